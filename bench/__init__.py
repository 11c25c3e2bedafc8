"""Speed, as ratios against a peer in the same run: the machine's own noise hits both alike."""

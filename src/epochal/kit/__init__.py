"""What sinks are made of: `SinkBase`, and the engines that several of them share."""

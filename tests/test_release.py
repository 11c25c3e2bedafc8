"""What `make release` builds: its metadata, and README as an index shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

import release

URL = "https://example.org/epochal"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    return release.build(URL, folder / "sources", folder / "dist")


def test_wheel_and_sdist_have_what_an_index_shows(built):
    wheel, sdist = built
    assert release.mistakes(wheel, sdist, URL) == []
    metadata = release.metadata_of(wheel)
    assert metadata["Version"] == release.version()
    assert metadata["License-Expression"] == "Apache-2.0"


def test_links_and_pictures_of_the_readme_are_absolute(built):
    readme = str(release.metadata_of(built[0]).get_payload())
    version = release.version()
    assert "![An epoch" in readme
    assert f"({URL}/raw/v{version}/docs/images/epoch-timeline.svg)" in readme
    assert f"({URL}/blob/v{version}/docs/guides/quick-start.md)" in readme


def test_every_extra_has_a_trial(built):
    from extra_trials import PARTS

    assert {"", *release.extras_of(built[0])} == set(PARTS)


def test_what_an_index_would_stumble_over_is_found(built):
    wheel, sdist = built
    assert release.mistakes(wheel, sdist, "https://other.org")[0] == "no URL Homepage"
    text = release.absolute_links("see [x](docs/x.md) and ![y](y.png)", URL, "1")
    assert text == f"see [x]({URL}/blob/v1/docs/x.md) and ![y]({URL}/raw/v1/y.png)"
    assert (
        release.absolute_links("[a](https://b.org) [c](#d)", URL, "1")
        == "[a](https://b.org) [c](#d)"
    )


def test_versions_that_disagree_are_refused(tmp_path, monkeypatch):
    (tmp_path / "src" / "epochal").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "9.9"\n')
    (tmp_path / "src" / "epochal" / "__init__.py").write_text('__version__ = "9.8"\n')
    monkeypatch.setattr(release, "ROOT", Path(tmp_path))
    with pytest.raises(SystemExit, match="does not have the version"):
        release.version()

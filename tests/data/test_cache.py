"""Where files come from: FEDNMAP_DATA, then the cache, then a download that is checked."""

import hashlib
import socket
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from fednmap.data import cache, load

CONTENTS = b"what was published"
MD5 = hashlib.md5(CONTENTS).hexdigest()


@pytest.fixture
def places(tmp_path, monkeypatch):
    """An own and a cache folder for the set `letters`, both empty."""
    own, cached = tmp_path / "own" / "letters", tmp_path / "cache" / "fednmap" / "letters"
    own.mkdir(parents=True)
    cached.mkdir(parents=True)
    monkeypatch.setenv("FEDNMAP_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two attempts
    return own, cached


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def address(tmp_path):
    (tmp_path / "web").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "web")))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_own_folder_comes_before_the_cache(places):
    own, cached = places
    assert cache.find("letters", ["a"]) is None
    (cached / "a").write_bytes(CONTENTS)
    assert cache.find("letters", ["a"]) == cached / "a"
    (own / "a").write_bytes(CONTENTS)
    assert cache.find("letters", ["a"]) == own / "a"


def test_download_is_checked_and_kept(places, address, tmp_path):
    (tmp_path / "web" / "a").write_bytes(CONTENTS)
    path = cache.download("letters", "a", MD5, [address])
    assert path == places[1] / "a"
    assert path.read_bytes() == CONTENTS
    assert cache.find("letters", ["a"]) == path


def test_download_falls_back_on_the_second_address(places, address, tmp_path):
    (tmp_path / "web" / "a").write_bytes(CONTENTS)
    assert cache.download("letters", "a", MD5, [address + "absent/", address]).read_bytes() == CONTENTS


def test_wrong_download_is_refused_and_not_kept(places, address, tmp_path):
    (tmp_path / "web" / "a").write_bytes(CONTENTS[:-1])
    with pytest.raises(ValueError, match="a of letters") as error:
        cache.download("letters", "a", MD5, [address])
    assert "\n" not in str(error.value)
    assert not list(places[1].iterdir())


def test_without_network_one_line_says_which_file_to_put_where(places):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(ValueError, match=f"put it into {places[0]} or {places[1]}") as error:
            cache.download("letters", "a", MD5, [closed])
    assert "a of letters" in str(error.value)
    assert closed + "a" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "module", "file"),
    [
        ("mnist", "pictures", "train-images-idx3-ubyte.gz"),
        ("fashion-mnist", "pictures", "train-images-idx3-ubyte.gz"),
        ("cifar10", "pictures", "cifar-10-binary.tar.gz"),
        ("heart-disease", "heart_disease", "processed.cleveland.data"),
    ],
)
def test_every_public_set_says_so(name, module, file, places, monkeypatch):
    monkeypatch.setattr(f"fednmap.data.{module}.cache.download", partial(_no_network))
    with pytest.raises(ValueError, match=f"no network for {file}"):
        load(name)


def _no_network(name, file, md5, addresses):
    assert all(address.startswith("http") and address.endswith("/") for address in addresses)
    assert len(md5) == 32
    raise ValueError(f"no network for {file}")


def test_folder_that_is_none_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDNMAP_DATA", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"FEDNMAP_DATA is .*absent"):
        cache.find("mnist", ["a"])

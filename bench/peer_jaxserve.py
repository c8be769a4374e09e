"""Worker of the peer comparison: jaxserve's engine, through the public LLM. Protocol: see peers.py."""

import json
import os
import sys
import time
from importlib.metadata import version

from bench.peer_transformers import peak_mib
from jaxserve import LLM, SamplingParams
from jaxserve.runner import DeviceRunner


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not an answer
    began = time.perf_counter()
    # Each prompt is computed twice, for its first token and for all of them: a prefix hit would spoil the difference.
    llm = LLM(sys.argv[1], dtype="float32", enable_prefix_caching=False)
    assert isinstance(llm.engine.runner, DeviceRunner)
    llm.engine.runner.warm.wait()
    ready = f"jaxserve {version('jaxserve')}, jax {version('jax')}, float32"
    print(json.dumps({"ready": ready, "seconds": time.perf_counter() - began}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate(request["prompts"], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": seconds, "tokens": tokens, "peak_mib": peak_mib()}), file=out)


if __name__ == "__main__":
    main()

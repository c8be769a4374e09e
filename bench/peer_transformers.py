"""Worker of the peer comparison: Hugging Face transformers in float32, in a Python that has it.

Runs outside the project's environment, so it imports nothing of the project. Speaks JSON lines (see peers.py):
says {"ready": ...} first, then answers {"prompts": [[ids]], "new_tokens": n} with seconds and tokens.
"""

import json
import os
import sys
import time

MODEL = sys.argv[1]


def peak_mib() -> float:
    """The most memory this process has held."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def load():
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    folder, file = os.path.split(MODEL) if MODEL.endswith(".gguf") else (MODEL, None)
    kwargs = {"gguf_file": file} if file else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()
    model.generation_config.eos_token_id = None  # every answer has its full length
    return model


def generate(model, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations; the prompts of one call are equally long, so nothing is padded."""
    import torch

    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
    return out[:, ids.shape[1] :].tolist()


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not an answer
    began = time.perf_counter()
    model = load()
    import torch
    import transformers

    version = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    print(json.dumps({"ready": version, "seconds": time.perf_counter() - began}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        tokens = generate(model, request["prompts"], request["new_tokens"])
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": tokens, "peak_mib": peak_mib()}), file=out)


if __name__ == "__main__":
    main()

"""Runs one vLLM engine as a file of JSON says, and writes what it answered: ``drive.py TASK RESULT``.

A process of its own for each engine: vLLM keeps state of the process it runs in. A task has ``engine`` (arguments of
``LLM``), and ``calls``: lists of prompts (lists of token ids) with ``tokens`` to generate and ``logprobs`` to tell.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="INFO",
    VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE",
)  # fmt: skip


def main() -> None:
    """Run the task."""
    task, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    from vllm import LLM, SamplingParams

    llm = LLM(
        skip_tokenizer_init=True, dtype="float32", block_size=64, enforce_eager=True, max_logprobs=200, seed=0,
        **task["engine"],
    )  # fmt: skip
    answers = []
    for call in task["calls"]:
        params = SamplingParams(
            temperature=0, max_tokens=call["tokens"], ignore_eos=True, detokenize=False,
            logprobs=call.get("logprobs"), prompt_logprobs=call.get("prompt_logprobs"),
        )  # fmt: skip
        prompts = [{"prompt_token_ids": p} for p in call["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append(
            [
                {
                    "tokens": list(o.outputs[0].token_ids),
                    "cached": o.num_cached_tokens,
                    "logprobs": [_numbers(x) for x in o.outputs[0].logprobs or []],
                    "prompt_logprobs": [_numbers(x) for x in o.prompt_logprobs or []],
                }
                for o in outputs
            ]
        )
    stats = llm.collective_rpc("lamina_stats")[0] if "additional_config" in task["engine"] else None
    config = llm.llm_engine.vllm_config.cache_config
    result.write_text(json.dumps({"answers": answers, "stats": stats, "blocks": config.num_gpu_blocks}))


def _numbers(found: object) -> dict[str, float] | None:
    return None if found is None else {str(token): x.logprob for token, x in found.items()}  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()

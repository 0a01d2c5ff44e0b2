"""Runs one vLLM engine as a file of JSON says, and writes what it answered: ``drive.py TASK RESULT``.

A process of its own for each engine: vLLM keeps state of the process it runs in. A task has ``engine`` (arguments of
``LLM``), and ``calls``: lists of prompts (lists of token ids) with ``tokens`` to generate and ``logprobs`` to tell.
Answers say in which steps they were computed, as first token and how many; one that was preempted starts anew.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="INFO",
    VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE",
)  # fmt: skip


def main() -> None:
    """Run the task."""
    task, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    from vllm import LLM, SamplingParams

    usual = {
        "skip_tokenizer_init": True, "dtype": "float32", "block_size": 64, "enforce_eager": True, "max_logprobs": 200,
        "seed": 0,
    }  # fmt: skip
    llm = LLM(**usual | task["engine"])
    answers, steps = [], _watch(llm.llm_engine.engine_core.engine_core.scheduler)
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
                    "steps": steps[o.request_id],
                    "logprobs": [_numbers(x) for x in o.outputs[0].logprobs or []],
                    "prompt_logprobs": [_numbers(x) for x in o.prompt_logprobs or []],
                }
                for o in outputs
            ]
        )
    ranks = llm.collective_rpc("lamina_stats") if "additional_config" in task["engine"] else [None]
    config = llm.llm_engine.vllm_config.cache_config
    result.write_text(
        json.dumps({"answers": answers, "stats": ranks[0], "ranks": ranks, "blocks": config.num_gpu_blocks})
    )


def _watch(scheduler: Any) -> dict[str, list[tuple[int, int]]]:
    """What the scheduler hands out from now on, by request."""
    steps: dict[str, list[tuple[int, int]]] = defaultdict(list)
    inner = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        running = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(running.req_ids, running.num_computed_tokens))
        for name, start in starts.items():
            # vLLM adds eight random digits to the name that it was given.
            steps[name.rpartition("-")[0]].append((start, output.num_scheduled_tokens[name]))
        return output

    scheduler.schedule = schedule
    return steps


def _numbers(found: object) -> dict[str, float] | None:
    return None if found is None else {str(token): x.logprob for token, x in found.items()}  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()

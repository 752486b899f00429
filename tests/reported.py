"""A run to be reported: one whose gap grows, whose reward falls, and whose model writes what no page should believe."""

import numpy as np
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder
from tokenizers import Tokenizer, models

HOSTILE = [
    "<script>window.hacked = 1</script>", "</script><img src=x onerror='window.hacked = 2'>", "\u202eright to left",
    "\u200b", "\x00", "&lt;b&gt;", "\"'`${window.hacked = 3}", "</textarea></style><b>bold</b>", "{{ 7 * 7 }}", "<!--",
    "\u2066", "\x1b[31m", "two words", "\n", "javascript:window.hacked = 4", "\U0001f469\u200d\U0001f680",
]  # fmt: skip
"""The tokens of the run's vocabulary."""

NUM_STEPS = 30
ROWS, LENGTH = 8, 6


def make_run(path, *, num_steps=NUM_STEPS, passes=("rollout", "train", "current")):
    """Record it. The gap is ten times as large starting at step 20; token 2 of the last row of each step lies furthest off."""
    draw = np.random.default_rng(0)
    with Recorder(path) as recorder:
        recorder.add_loss(Loss(kind="ppo_clip", clip_low=0.2, clip_high=0.2))
        recorder.add_contract(
            "rollout", {"engine": "vllm", "config": {"note": "<i>of the engine</i>"}, "dtype": "bfloat16"}
        )
        recorder.add_contract("train", {"engine": "trl", "dtype": "float32", "same": True})
        for step in range(1, num_steps + 1):
            _add_step(recorder, draw, step, passes)
            recorder.add_metrics(
                step, {"grad_norm": 1.0 + 0.01 * step, "learning_rate": 1e-3, "eval/<u>score</u>": 0.5}
            )
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(HOSTILE)}, unk_token=HOSTILE[0]))
    (path / "tokenizer").mkdir()
    tokenizer.save(str(path / "tokenizer" / "tokenizer.json"))
    return path


def _add_step(recorder, draw, step, passes):
    rollout = -(0.8 + draw.exponential(0.7, (ROWS, LENGTH))).astype(np.float32)
    gap = 0.02 if step < 20 else 0.2
    near = {name: np.minimum(rollout + draw.normal(0, gap, rollout.shape), 0).astype(np.float32) for name in passes}
    near |= {"rollout": rollout} if "rollout" in passes else {}
    if "train" in near:
        near["train"][-1, 2] = rollout[-1, 2] - 1 - step / 100
    mask = np.ones((ROWS, LENGTH), bool)
    mask[0, -1] = False
    reward = draw.random(ROWS) + 0.05 * min(step, 15)
    batch = recorder.add_sequences(
        step=step,
        seq_ids=[f"<em>{step}</em>-{row}" for row in range(ROWS)],
        group_ids=[f"{step}-{row // 4}" for row in range(ROWS)],
        prompt_ids=draw.integers(0, len(HOSTILE), (ROWS, 3)),
        response_ids=draw.integers(0, len(HOSTILE), (ROWS, LENGTH)),
        response_mask=mask,
        reward=reward,
        advantage=reward - reward.mean(),
        policy_version=step - 1,
        finish_reason="stop",
    )
    for name in passes:
        recorder.add_scores(name, batch, logprobs=near[name], entropy=-near[name])

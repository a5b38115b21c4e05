"""The published consistency report (Qwen3-8B, TP2/CP4 against TP4/CP2, two updates): its fields and numbers, folder names shortened."""

from __future__ import annotations

from typing import Any

RUNS = ("cpgrad-tp2cp4-r5", "cpgrad-tp4cp2-r5")
WEIGHTS = (
    "3496e2625f9638323127a3967e42cddcad168315eb7b4af78078b9f3a91fd326",
    "d40036d7a970154371e07c699dd0af284c531e72a7991608d8895be104d24045",
    "05a28e2f229df5154aac7ba194f11dedfddcd4b2abf3846856f0c64143655fae",
)
TOKENS = (
    ("875d2f13205808479cc3ecbf518b8f5f066b7755547e6d5205e38f2ffd68a8ae", 5208),
    ("10ee3cb81d196c791fd6a5ea0a14db968d4a54ae29ab21d73b263cb25b54bae1", 5016),
)
STEPS = (  # loss, KL, entropy, gradient norm
    (3.9848928281571716e-05, 0.00398489274084568, 0.12023040652275085, 0.022594607365076035),
    (7.246405584737659e-05, 0.007246405817568302, 0.15511181950569153, 0.03439536852782456),
)
TIMES = (
    "update_weights_time", "data_preprocess_time", "train_wait_time", "ref_log_probs_time", "log_probs_time", "actor_train_time",
    "train_time", "log_probs_tflops", "ref_log_probs_tflops", "actor_train_tflops", "actor_train_tok_per_s", "step_time", "wait_time_ratio",
)  # fmt: skip
PERFORMANCE = (  # by run and step
    (
        (
            27.520503759384155, 0.011134147644042969, 38.43356251716614, 2.0215706825256348, 0.4188084602355957,
            3.4440557956695557, 6.259614706039429, 23.826277657950442, 4.936085957976621, 8.69206010392064,
            1512.1706235271713, 44.693177223205566, 0.8599424991698886,
        ),
        (
            27.544374227523804, 0.011069059371948242, 37.61604309082031, 0.5046274662017822, 0.33281421661376953,
            3.6114234924316406, 4.819371938705444, 28.863948621269795, 19.03648352927103, 7.979955108200179,
            1388.9260039737492, 42.43541502952576, 0.8864304276191899,
        ),
    ),
    (
        (
            27.7245192527771, 0.010148048400878906, 39.17587208747864, 1.6525583267211914, 0.4971926212310791,
            3.4939475059509277, 5.906228542327881, 20.069981397479843, 6.038302247927573, 8.567942113105248,
            1490.5776320707969, 45.08210062980652, 0.8689895000495405,
        ),
        (
            27.464809894561768, 0.011140823364257812, 37.27148199081421, 0.4749336242675781, 0.39269542694091797,
            3.2326793670654297, 4.344621896743774, 24.462552374497854, 20.22668423104906, 8.9148950681321,
            1551.6540400211227, 41.61610388755798, 0.8956023872757899,
        ),
    ),
)  # fmt: skip
BACKENDS = {"attention": "attention.deterministic.v1", "ffn": "ffn.qwen3.deterministic.v1", "logp": "linear_logp.bitwise.v1"}
CALLS = {
    "megatron/training": (8, {"attention": 2304, "ffn": 2304, "logp": 48}),
    "vllm/rollout": (13, {"attention": 3168, "ffn": 3176, "logp": 8}),
}
SOURCE = "VIME runtime torch.ne/max metrics; VIME reports sample means, converted to counts with global_batch_size"


def published_report() -> dict[str, Any]:
    return {
        "runs": [_run(name, PERFORMANCE[i]) for i, name in enumerate(RUNS)],
        "all_parameter_hash_comparisons": [
            {
                "version": f"weight_v{i:06d}",
                "sha256": [sha] * 2,
                "tensor_count": 399,
                "unequal_parameter_tensors": [],
                "bitwise_equal": True,
            }
            for i, sha in enumerate(WEIGHTS, 1)
        ],
        "gradient_norm_comparisons": [
            {"step": i, "norms": [step[3]] * 2, "exactly_equal": True, "relative_difference_percent": 0.0} for i, step in enumerate(STEPS)
        ],
        "tokens_equal": True,
    }


def _run(name: str, performance: tuple) -> dict[str, Any]:
    return {
        "run_id": name,
        "steps": {str(i): _step(i, *values) for i, values in enumerate(STEPS)},
        "performance": {str(i): {f"perf/{key}": value for key, value in zip(TIMES, row)} for i, row in enumerate(performance)},
        "tokens": {str(i): {"sha256": sha, "sample_count": 8, "token_count": n} for i, (sha, n) in enumerate(TOKENS)},
        "validation": _validation(name),
    }


def _step(number: int, loss: float, kl: float, entropy: float, norm: float) -> dict[str, Any]:
    zeros = (
        "pg_loss", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff", "train_current_rollout_logprob_mismatch_count",
        "train_current_rollout_logprob_max_abs_diff", "tis_clipfrac", "tis_abs",
    )  # fmt: skip
    rest = {
        "loss": loss,
        "kl_loss": kl,
        "entropy_loss": entropy,
        "grad_norm": norm,
        "ois": 1.0,
        "tis": 1.0,
        "lr-pg_0": 5e-07,
        "lr-pg_1": 5e-07,
    }
    counts = {"train_current_rollout_logprob_numel": 512.0, "global_batch_size": 8, "step": number}
    return {f"train/{key}": value for key, value in {**dict.fromkeys(zeros, 0.0), **rest, **counts}.items()}


def _validation(name: str) -> dict[str, Any]:
    folder = f"/data/runs/{name}/mismatch-sidecars"
    row = {"active_token_count": 4096.0, "bitwise_mismatch_count": 0.0, "max_abs_dlogp": 0.0, "mean_abs_dlogp": 0.0}
    row |= {"vime_mean_active_tokens_per_sample": 512.0, "vime_mean_mismatch_count_per_sample": 0.0}
    distances = ("max_abs_diff", "mismatch_k3_kl", "mismatch_kl", "train_rollout_logprob_abs_diff")
    flags = ("bitwise_equal", "passed", "require_exact", "torch_equal")
    return {
        "cudagraph": {
            "checks": dict.fromkeys(("capture_sizes", "engine_mode", "launcher_marker", "not_eager"), True),
            "expected_capture_sizes": [1, 2, 3, 4],
            "passed": True,
        },
        "errors": [],
        "group": "consistency",
        "offline_tensor_comparison": {"artifact_count": 16, "comparable_artifact_count": 16, "reason": None, "status": "available"},
        "passed": True,
        "run_id": name,
        "runtime_readbacks": {"errors": [], "frameworks": {side: _framework(*calls) for side, calls in CALLS.items()}, "passed": True},
        "runtime_scalar_logprob": {
            "bitwise_zero": True,
            "errors": [],
            "evidence_source": SOURCE,
            "passed": True,
            "rows": [{**row, "step": step} for step in range(2)],
            "total_active_token_exposure": 8192.0,
        },
        "schema_version": "rlkernel.vime_qwen3_8b_tp4_cp2_200.validation.v1",
        "train_rollout_logprob": {
            "artifacts": [f"{folder}/rank{rank:05d}.call{call:08d}.pt" for rank in range(8) for call in range(2)],
            **dict.fromkeys(distances, 0.0),
            **dict.fromkeys(flags, True),
            "bitwise_mismatch_count": 0,
            "element_count": 8192,
            "errors": [],
            "mismatch_count": 0,
            "sample_count": 16,
        },
    }


def _framework(count: int, calls: dict[str, int]) -> dict[str, Any]:
    modules = {
        module: {
            "backend_ids": [f"rlkernel.{BACKENDS[module]}"],
            "call_count": number,
            "case_id": "R/R",
            "expected_implementation": "rl_kernel",
            "implementations": ["rl_kernel"],
            "installed_processes": count,
        }
        for module, number in calls.items()
    }
    return {"modules": modules, "readback_count": count}

"""The distillation step: it learns, and ends in the same bytes everywhere."""

from __future__ import annotations

from stages import opd_profile


def test_the_tiny_step_has_its_known_digest():
    losses: list[str] = []
    result = opd_profile.profile("tiny", "fp32", "cpu", 2, losses.append)
    assert result["digest"] == opd_profile.KNOWN_DIGEST
    assert opd_profile.profile("tiny", "fp32", "cpu", 1, losses.append)["digest"] != opd_profile.KNOWN_DIGEST, "the control: a step less"
    assert set(result["seconds"]) >= {"rollout", "teacher_forward", "student_forward", "backward", "optimizer_step"}

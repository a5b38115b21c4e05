"""Source mutations, second part: ranks that disagree, stale state, and steps, samples or tokens too few or too many."""

from __future__ import annotations

from tests.mutations.patches import CP2, DP2, FIRST_LOGPROB, FIRST_REFERENCE, LM_HEAD, OPS, TP3, Patch, at

FIRST_GRADIENT = at(1, "gradients", LM_HEAD, 0)
FIRST_TOKEN = at(1, "tokens", "tokens")

RANKS = [
    Patch(
        "rank 1 samples with another seed", "ranks disagree", "stages/rollout.py",
        "cfg.sampling, cfg.seed, job.step.iteration)", "cfg.sampling, cfg.seed + mesh.rank, job.step.iteration)", DP2, FIRST_TOKEN,
    ),
    Patch(
        "random numbers keyed by slot instead of sample", "ranks disagree", "stages/engine.py",
        "            [requests[i].sample for _, i in active],\n", "            [slot for slot, _ in active],\n", CP2, FIRST_TOKEN,
    ),
    Patch(
        "samples of two ranks swapped in the gather", "ranks disagree", "stages/ranks.py",
        "    return [item for p in parts for item in p]\n", "    return [item for p in reversed(parts) for item in p]\n", DP2, FIRST_TOKEN,
    ),
    Patch(
        "rows of two ranks left in the order of the ranks", "ranks disagree", OPS,
        "    return [rows[batch.cp_order] for rows in whole]\n", "    return list(whole)\n", CP2, FIRST_REFERENCE,
    ),
    Patch(
        "one ULP in one weight of rank 1", "ranks disagree", "stages/weights.py",
        "        parameter.data.copy_(whole if sliced else slices.take(name, whole))\n",
        """        parameter.data.copy_(whole if sliced else slices.take(name, whole))
        if name == "model.layers.0.input_layernorm.weight" and slices.mesh.rank == 1:
            parameter.data[:1].view(torch.int32).add_(1)
""",
        TP3, FIRST_LOGPROB,
    ),
    Patch(
        "positions of the rotary embedding counted from 1", "ranks disagree", OPS,
        "    return _apply(_Rope, x, positions, cos, sin)\n", "    return _apply(_Rope, x, positions + 1, cos, sin)\n", CP2, FIRST_LOGPROB,
    ),
    Patch(
        "advantages over the half of a group that a rank holds", "ranks disagree", "stages/objectives.py",
        "group_advantages(rollout.rewards.tolist(), cfg.sampling.samples_per_prompt, ",
        "group_advantages(rollout.rewards.tolist(), cfg.sampling.samples_per_prompt // cfg.layout.dp, ",
        DP2, at(1, "advantages", "advantages"),
    ),
    Patch(
        "gradient divided by the rank's own tokens", "ranks disagree", "stages/train.py",
        "    step = trainer.update(divisor)\n", "    step = trainer.update(sum(len(batch.head_slots) for batch in update.batches))\n",
        DP2, FIRST_GRADIENT,
    ),
    Patch(
        "gradients of the ranks not added", "ranks disagree", "stages/exact_gradients.py",
        "        collectives.exact_all_reduce([self.buffer(name) for name in chosen], group, names=chosen)\n",
        "        collectives.exact_all_reduce([self.buffer(name) for name in chosen], None, names=chosen)\n", DP2, FIRST_GRADIENT,
    ),
    Patch(
        "ZeRO clips by the norm of its own partition", "ranks disagree", "stages/zero_hooks.py",
        "                zero.scaled_global_norm = lambda norm_type=2: self._norm\n",
        "                zero.scaled_global_norm = lambda norm_type=2: torch.stack(\n"
        "                    [g.norm() for own in zero.averaged_gradients.values() for g in own]\n                ).norm()\n",
        DP2, at(1, "exp_avg", LM_HEAD),
    ),
]  # fmt: skip

STALE = [
    Patch(
        "key and value of the first token kept from the weights before", "stale", "stages/engine.py",
        "            keys[rows], values[rows] = collectives.all_gather_rows([k, v], counts, self.model.par.mesh.cp_group)\n",
        """            new = collectives.all_gather_rows([k, v], counts, self.model.par.mesh.cp_group)
            fresh = (rows % self._length != 0) | (self.version == "weight_v000001")
            keys[rows[fresh]], values[rows[fresh]] = (x[fresh] for x in new)
""",
        DP2, at(2, "tokens", "tokens"),
    ),
    Patch(
        "the engine keeps its weights", "stale", "stages/segment.py",
        "        hand_over(self.trainer, self.engine, self.rollout_mesh, s.version_out)\n", "        del hand_over\n",
        DP2, at(2, "tokens", "tokens"),
    ),
    Patch(
        "the rollout reads the checkpoint again", "stale", "stages/rollout.py",
        "    engine.load_weights(read_weights(job.step.weights_in), job.step.version_in)\n",
        "    engine.load_weights(read_weights(job.checkpoint), job.step.version_in)\n", CP2, at(2, "tokens", "tokens"),
    ),
    Patch(
        "the reference follows the policy", "stale", "stages/ref_logprob.py",
        "    load_slices(model, read_weights(job.checkpoint))\n", "    load_slices(model, read_weights(job.step.weights_in))\n",
        CP2, at(2, "reference_logprob", "logprobs"),
    ),
    Patch(
        "KL to the rollout's policy instead of the reference", "stale", "stages/objectives.py",
        "kl_terms(l, tokens.reference, cfg.kl_type)[1]", "kl_terms(l, tokens.rollout, cfg.kl_type)[1]", DP2, at(2, "gradients", LM_HEAD, 1),
    ),
    Patch(
        "moments not carried over", "stale", "stages/zero_hooks.py",
        "                self.base.state[param][key].copy_(value)\n", "                self.base.state[param][key].zero_()\n",
        CP2, at(2, "exp_avg", LM_HEAD),
    ),
    Patch(
        "step of the bias correction not carried over", "stale", "stages/zero_hooks.py",
        """            self.base.state[flat]["step"] = step\n""", """            self.base.state[flat]["step"] = 0\n""",
        CP2, at(2, "weights", LM_HEAD),
    ),
    Patch(
        "the first learning rate for ever", "stale", "stages/optimizer.py",
        """m, v, group["lr"], beta1""", """m, v, self.defaults["lr"], beta1""", DP2, at(2, "weights", LM_HEAD),
    ),
]  # fmt: skip

COUNTS = [
    Patch(
        "the last micro-batch has no backward pass", "one too few or too many", "stages/train.py",
        "            trainer.backward((g_logprob * logprobs).sum() + (g_entropy * entropy).sum())\n",
        "            if batch is not update.batches[-1]:\n"
        "                trainer.backward((g_logprob * logprobs).sum() + (g_entropy * entropy).sum())\n",
        DP2, at(1, "gradients", LM_HEAD, 0, "counts.backwards is 1, expected 2"),
    ),
    Patch(
        "the second optimizer step is lost", "one too few or too many", "stages/zero_hooks.py",
        "        self.engine.step()\n",
        """        if not any(state["step"] for state in self.base.state.values()):\n            self.engine.step()\n""",
        DP2, at(2, "exp_avg", LM_HEAD),
    ),
    Patch(
        "learning rate of the next step", "one too few or too many", "stages/optimizer.py",
        "    done = (step - cfg.warmup_steps)", "    done = (step + 1 - cfg.warmup_steps)", CP2, at(1, "metrics", "train/lr-pg_0", 0),
    ),
    Patch(
        "one token more than max_new_tokens", "one too few or too many", "stages/engine.py",
        "len(completions[i].token_ids) == sampling.max_new_tokens:", "len(completions[i].token_ids) == sampling.max_new_tokens + 1:",
        DP2, FIRST_TOKEN,
    ),
    Patch(
        "a padding token in the mean of the loss", "one too few or too many", "stages/objectives.py",
        "counts=lengths.to(torch.float32)", "counts=(lengths + 1).to(torch.float32)", CP2, FIRST_GRADIENT,
    ),
    Patch(
        "a padding token in the mean of the metrics", "one too few or too many", "stages/objectives.py",
        "/ max(b - a, 1) for a, b", "/ (b - a + 1) for a, b", CP2, at(1, "metrics", "train/entropy_loss", 0),
    ),
]  # fmt: skip

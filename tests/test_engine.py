"""The rollout engine: a sample depends on its prompt and its key, never on what runs beside it."""

import torch
from small_models import NUMERICS, ours, reference

from pipeline.config import Sampling
from stages.batch import Sample, pack
from stages.engine import EOS, LENGTH, LockstepEngine, Request

SAMPLING = Sampling(max_new_tokens=12, temperature=0.8)
REQUESTS = [Request(p, k, [(7 * p + i) % 130 for i in range(3 + 5 * p)]) for p in range(3) for k in range(2)]


def recorder(model):
    """Records nothing: the replay runs the step again on the same buffers and, like a CUDA graph, passes no module's counter."""

    def record(step):
        step()

        def replay():
            counts = [r.call_count for r in model.readbacks.values()]
            step()
            for r, count in zip(model.readbacks.values(), counts):
                r.call_count = count

        return replay

    return record


def engine(batch_size: int = 4, case: str = "R/R", eos=(5, 17, 40), graph_sizes=(), precision="fp32", stored=True) -> LockstepEngine:
    hf, config = reference("Qwen3ForCausalLM", False)
    model = ours(hf, config, case, precision)
    if stored:
        model.to(model.par.dtype)  # else fp32 masters, as the trainer has them
    made = LockstepEngine(model, set(eos), batch_size, graph_sizes, recorder(model))
    made.load_weights(((n, p.detach()) for n, p in hf.named_parameters()), "weight_v000001")
    return made


def generate(batch_size: int = 4, requests=REQUESTS, sampling: Sampling = SAMPLING, **options) -> dict:
    completions = engine(batch_size, **options).generate(requests, sampling, seed=1, iteration=2)
    return {(r.prompt_id, r.sample): c for r, c in zip(requests, completions, strict=True)}


def test_batch_size_and_order_change_nothing():
    whole = generate()
    assert generate(batch_size=1) == whole
    assert generate(batch_size=16) == whole
    assert generate(requests=REQUESTS[::-1]) == whole
    assert generate(requests=REQUESTS[3:4])[(1, 1)] == whole[(1, 1)]


def test_samples_of_a_prompt_differ_and_lengths_mix():
    whole = generate()
    assert whole[(0, 0)].token_ids != whole[(0, 1)].token_ids
    for c in whole.values():
        assert (c.finish == EOS) == (c.token_ids[-1] in (5, 17, 40))
        assert c.finish == EOS or len(c.token_ids) == SAMPLING.max_new_tokens
    assert {c.finish for c in whole.values()} == {EOS, LENGTH}


def test_recorded_decode_steps_change_nothing_but_the_evidence():
    eager, recorded = engine(), engine(graph_sizes=(1, 3, 8))  # batches of 2 and 4 are padded
    expected, got = (e.generate(REQUESTS, SAMPLING, seed=1, iteration=2) for e in (eager, recorded))
    assert got == expected
    described, plain = recorded.describe(), eager.describe()
    assert described["modules"] == plain["modules"], "calls are counted as if every step had been launched"
    assert (described["graph_mode"], described["capture_sizes"], plain["graph_mode"]) == ("cuda_graph", [1, 3, 8], "eager")
    assert 0 < described["graph_replays"] < recorded.forwards, "prompts are not decode steps"
    small = engine(graph_sizes=(1,))
    assert small.generate(REQUESTS, SAMPLING, seed=1, iteration=2) == expected
    assert small.describe()["graph_replays"] < described["graph_replays"], "larger batches than were recorded run eagerly"


def test_joined_projections_are_the_parameters_own_memory():
    model = engine().model
    attention, ffn = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for joined, first in ((attention.joined, attention.q_proj.weight), (ffn.joined, ffn.gate_proj.weight)):
        assert joined.data_ptr() == first.data_ptr(), "no second copy, and new weights reach both"
        assert len(joined) > len(first)
    assert engine(case="P/P").model.model.layers[0].mlp.joined is None, "PyTorch's side stays as it is trained"


def trainer_mismatches(case: str, precision: str = "fp32") -> int:
    """Tokens whose logprob by one packed forward has other bytes than the engine's."""
    whole = generate(case=case, precision=precision)
    samples, offset = [], 0
    for i, r in enumerate(REQUESTS):
        c = whole[(r.prompt_id, r.sample)]
        samples.append(Sample(i, torch.tensor(r.token_ids + c.token_ids), len(r.token_ids), offset))
        offset += len(c.token_ids)
    recorded = torch.tensor([x for r in REQUESTS for x in whole[(r.prompt_id, r.sample)].logprobs])
    with torch.no_grad():
        logp, _ = engine(case=case, precision=precision, stored=False).model(pack(samples, NUMERICS.token_leaf), 1 / SAMPLING.temperature)
    return int((logp.view(torch.int32) != recorded.view(torch.int32)).sum())


def test_logprobs_are_the_trainers_own_bits():
    assert trainer_mismatches("R/R") == 0
    assert trainer_mismatches("P/P") > 0  # the control: PyTorch's kernels don't agree with themselves


def test_so_they_are_in_bf16_storage():
    assert trainer_mismatches("R/R", "bf16") == 0
    assert generate(precision="bf16") != generate(), "the control: another precision is another result"


def test_greedy_decoding_takes_the_largest_logit():
    greedy = Sampling(max_new_tokens=4, temperature=0.0)
    assert generate(sampling=greedy)[(0, 0)].token_ids == generate(sampling=greedy)[(0, 1)].token_ids
    top1 = generate(sampling=Sampling(max_new_tokens=4, temperature=1.0, top_k=1))
    assert {k: c.token_ids for k, c in top1.items()} == {k: c.token_ids for k, c in generate(sampling=greedy).items()}


def test_new_weights_drop_the_cache():
    one = engine()
    before = one.generate(REQUESTS, SAMPLING, 1, 2)
    weights = [(n, p.detach() * 1.5) for n, p in one.model.named_parameters()]
    one.load_weights(iter(weights), "weight_v000002")
    after = one.generate(REQUESTS, SAMPLING, 1, 2)
    fresh = engine()
    fresh.load_weights(iter(weights), "weight_v000002")
    assert after == fresh.generate(REQUESTS, SAMPLING, 1, 2) != before

"""The drafter compared with the dense reference, with itself split in other ways, and with changed inputs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.dense_drafter import dense_hidden, dense_loss
from dflash_core.config import DrafterConfig, ObjectiveConfig
from dflash_core.drafter.drafter import DFlashDrafter, rotary, rotary_tables, rotate
from dflash_core.drafter.shape import drafter_shape
from dflash_core.errors import UserError
from dflash_core.objective.labels import supervised_slots
from dflash_core.objective.loss import block_embeddings, draft_chunks, project_microbatch
from dflash_core.target.shape import read_shape
from tests.support.drafter_cases import (
    SHAPE,
    assert_close,
    assert_sums_close,
    gradients,
    make_case,
    make_drafter,
    run,
)

OBJECTIVES = {
    "decay": ObjectiveConfig(),
    "dpace": ObjectiveConfig(weighting="dpace"),
    "target argmax": ObjectiveConfig(labels="target", gamma=2.0),
    "kl": ObjectiveConfig(loss="kl", labels="target"),
    "kl dpace": ObjectiveConfig(loss="kl", weighting="dpace", dpace_alpha=0.2),
    "stop at disagreement": ObjectiveConfig(labels="target", stop_at_disagreement=True, weighting="dpace"),
}
SHAPES = {
    "two layers": SHAPE,
    "sliding window": replace(SHAPE, sliding_window=6),
    "mixed windows": replace(SHAPE, sliding_window=6, sliding_layers=(1,)),
    "biases": replace(SHAPE, attention_bias=True),
    "other heads": replace(SHAPE, num_heads=4, num_kv_heads=4, head_dim=6, num_layers=1, block_size=3),
}


def hidden_states(drafter, case, **kwargs):
    bounds, anchor_tokens = case.cu_seqlens, case.token_ids[case.anchors.long()]
    return drafter.forward_blocks(
        block_embeddings(case.ends, anchor_tokens, drafter.shape.mask_token_id, drafter),
        project_microbatch(drafter, case.features, bounds),
        context_start_A=bounds[case.anchor_sample.long()],
        anchor_A=case.anchors,
        **kwargs,
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_dense_reference(shape, objective, dtype):
    case, drafter = make_case(shape), make_drafter(shape)
    if objective.stop_at_disagreement:
        # the target agrees with every third token, and with five tokens in a row
        labels = case.target_labels()
        agrees = (torch.arange(len(labels)) % 3 == 0) | ((torch.arange(len(labels)) - 31).abs() < 3)
        case.token_ids = torch.where(agrees & (labels >= 0), labels, case.token_ids)
    if dtype == torch.float64:
        case = case.double()
    sums = run(drafter, case, objective, max_draft_slots=5 * shape.block_size)
    weights = {k: v.detach().double().requires_grad_() for k, v in drafter.state_dict().items()}
    exact = case.double()
    features, token_ids, loss_mask, *where = exact.arguments()
    hidden = dense_hidden(weights, shape, exact.ends.embed_VD, features, token_ids, *where)
    loss_sum, weight_sum, correct, supervised = dense_loss(
        hidden, exact.ends.head_VD, token_ids, loss_mask, *where, objective, exact.last_hidden
    )
    loss_sum.backward()
    # 1e-6 for float64 too, because weights are float32 masters and gradients are rounded to float32
    relative = 1e-5 if dtype == torch.float32 else 1e-6
    torch.testing.assert_close(sums.loss_sum, loss_sum.detach(), rtol=relative, atol=0)
    torch.testing.assert_close(sums.weight_sum, weight_sum.detach(), rtol=relative, atol=0)
    assert sums.correct_K.tolist() == correct.sum(0).tolist()
    assert sums.count_K.tolist() == supervised.sum(0).tolist()
    assert_close(gradients(drafter), {k: v.grad for k, v in weights.items()}, relative)
    torch.testing.assert_close(hidden_states(drafter, case).double(), hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_same_step_however_it_is_split(objective):
    """Whole, in chunks of 1, 2 and 5 blocks, and as microbatches 1+4, 2+3, 1+1+1+1+1."""
    case, drafter = make_case(), make_drafter()
    expected = run(drafter, case, objective)
    expected_grads = gradients(drafter)
    for slots in (1, 4, 8, 20):
        assert_sums_close(run(drafter, case, objective, max_draft_slots=slots), expected)
        assert_close(gradients(drafter), expected_grads)
    for cuts in ([0, 1, 5], [0, 2, 5], [0, 1, 2, 3, 4, 5]):
        parts = [run(drafter, case.samples(i, j), objective) for i, j in zip(cuts, cuts[1:])]
        assert_sums_close(sum(parts[1:], parts[0]), expected)
        assert_close(gradients(drafter), expected_grads)


@pytest.mark.parametrize("slots", [[], [0], [47], [1, 2, 5, 30, 31]], ids=str)
def test_kept_slots_are_those_of_all(slots):
    """The last layer runs for the kept slots alone; they still attend to all the others."""
    case, drafter = make_case().double(), make_drafter().double()
    every = hidden_states(drafter, case)
    selected = hidden_states(drafter, case, keep_P=torch.tensor(slots, dtype=torch.int64))
    torch.testing.assert_close(selected, every.flatten(0, 1)[slots], rtol=1e-11, atol=1e-12)


def test_runs_are_bit_equal():
    case, drafter = make_case(), make_drafter()
    results = []
    for _ in range(2):
        sums = run(drafter, case, OBJECTIVES["dpace"], max_draft_slots=8)
        results.append((sums.loss_sum, gradients(drafter)))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][k], v) for k, v in results[1][1].items())


def test_only_the_rows_before_supervised_slots_are_read_of_the_last_hidden_state():
    """Forward KL needs lm_head's input only there: all other rows may hold anything."""
    case, drafter = make_case(), make_drafter()
    objective = ObjectiveConfig(loss="kl")
    expected, expected_grads = run(drafter, case, objective), gradients(drafter)
    ends = case.cu_seqlens[case.anchor_sample.long() + 1]
    supervised_AK = supervised_slots(case.loss_mask, case.anchors, ends, block_size=4)
    rows = case.anchors.long()[:, None] + torch.arange(4) - 1
    unread = torch.ones(len(case.last_hidden), dtype=torch.bool)
    unread[rows[supervised_AK]] = False
    assert 10 < int(unread.sum()) < 30
    case.last_hidden[unread] = torch.nan
    assert_sums_close(run(drafter, case, objective), expected, 0.0)
    assert_close(gradients(drafter), expected_grads, 0.0)


def test_no_anchor_gives_zero_sums_and_zero_gradients():
    drafter = make_drafter()
    case = make_case().samples(3, 4)
    assert len(case.anchors) == 0
    sums = run(drafter, case, OBJECTIVES["decay"])
    assert float(sums.weight_sum) == 0
    assert sums.loss() == 0
    # every parameter has a gradient: ranks reduce the same set
    assert all(not g.any() for g in gradients(drafter).values())


def test_evaluation_keeps_no_graph_and_gives_the_same_sums():
    case, drafter = make_case(), make_drafter()
    sums = run(drafter, case, OBJECTIVES["dpace"], backward=False)
    assert all(p.grad is None for p in drafter.parameters())
    assert_sums_close(sums, run(drafter, case, OBJECTIVES["dpace"]))


@pytest.mark.parametrize("shape", [SHAPE, SHAPES["sliding window"]], ids=["full", "window"])
def test_features_from_the_anchor_on_change_nothing(shape):
    """Block by block: the context strictly before the anchor matters, every other row does not."""
    case, drafter = make_case(shape), make_drafter(shape)
    with torch.no_grad():
        before = hidden_states(drafter, case)
        for row in range(len(case.features)):
            changed = replace(case, features=case.features.clone())
            changed.features[row] += 1.0
            after = hidden_states(drafter, changed)
            for a, anchor in enumerate(case.anchors.tolist()):
                first = int(case.cu_seqlens[int(case.anchor_sample[a])])
                if shape.sliding_window is not None:
                    # for every slot: with two layers it also depends, through its block, on slot 0's context
                    first = max(first, anchor + 1 - shape.sliding_window)
                seen = first <= row < anchor
                for k in range(shape.block_size):
                    assert torch.equal(after[a, k], before[a, k]) != seen, (row, anchor, k)


def test_another_block_and_other_slots():
    """The anchor token of a block reaches all its slots and no other block."""
    case, drafter = make_case(), make_drafter()
    with torch.no_grad():
        before = hidden_states(drafter, case)
        for a, anchor in enumerate(case.anchors.tolist()):
            changed = replace(case, token_ids=case.token_ids.clone())
            changed.token_ids[anchor] = 3
            after = hidden_states(drafter, changed)
            for other in range(len(before)):
                same = (after[other] == before[other]).all(-1)
                assert same.all() if other != a else not same.any()


def test_every_slot_reaches_every_other_slot_of_its_block():
    case, drafter = make_case().samples(0, 1), make_drafter()
    context = project_microbatch(drafter, case.features, case.cu_seqlens)
    embeds = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(5))
    where = {"context_start_A": torch.zeros(3, dtype=torch.int32), "anchor_A": case.anchors}
    with torch.no_grad():
        before = drafter.forward_blocks(embeds, context, **where)
        for k in range(4):
            changed = embeds.clone()
            changed[1, k] += 1
            after = drafter.forward_blocks(changed, context, **where)
            # bidirectional: earlier slots change too
            assert not (after[1] == before[1]).all(-1).any()
            assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_slots_past_the_end_do_not_read_the_next_sample():
    """The block at row 6 of 8 has positions 6..9 whatever follows, even a sample without prompt."""
    case, drafter = make_case(), make_drafter()
    with torch.no_grad():
        alone = hidden_states(drafter, case.samples(0, 1))
        torch.testing.assert_close(alone, hidden_states(drafter, case)[:3], rtol=1e-5, atol=1e-6)


def test_chunks_hold_at_most_max_draft_slots(monkeypatch):
    case, drafter = make_case(), make_drafter()
    chunk_slots = []
    forward = DFlashDrafter.forward_blocks

    def record(self, embeds, *args, **kwargs):
        chunk_slots.append(embeds.shape[0] * embeds.shape[1])
        return forward(self, embeds, *args, **kwargs)

    monkeypatch.setattr(DFlashDrafter, "forward_blocks", record)
    for max_draft_slots, expected in ((8, [8] * 6), (20, [20, 20, 8]), (100, [48])):
        chunk_slots.clear()
        run(drafter, case, OBJECTIVES["decay"], max_draft_slots=max_draft_slots)
        assert chunk_slots == expected


def test_slots_of_blocks_are_found_without_waiting_for_the_device():
    """Tensors of the device `meta` have no values: whoever reads one there fails."""
    microbatch = make_case().microbatch()
    sizes = {"block_size": 8, "max_draft_slots": 20}
    on_host = list(draft_chunks(microbatch, torch.device("cpu"), None, **sizes))
    elsewhere = list(draft_chunks(microbatch, torch.device("meta"), None, **sizes))
    assert [[t.shape for t in chunk] for chunk in elsewhere] == [
        [t.shape for t in chunk] for chunk in on_host
    ]
    assert all(t.is_meta for chunk in elsewhere for t in chunk)


def test_tensor_names_and_shapes_are_those_that_servers_load():
    state = {k: tuple(v.shape) for k, v in DFlashDrafter(replace(SHAPE, num_layers=1)).state_dict().items()}
    assert state == {
        "fc.weight": (32, 96),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "layers.0.input_layernorm.weight": (32,),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.self_attn.q_proj.weight": (48, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (32, 48),
        "layers.0.self_attn.q_norm.weight": (8,),
        "layers.0.self_attn.k_norm.weight": (8,),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
    }


def test_initial_weights_come_from_the_generator_alone():
    def weights(seed):
        return DFlashDrafter(SHAPE, torch.Generator().manual_seed(seed)).state_dict()

    torch.manual_seed(9)
    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert abs(float(first["fc.weight"].std()) - 0.02) < 0.002
    assert torch.equal(first["norm.weight"], torch.ones(32))


def target_config(**changes):
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "vocab_size": 61,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 100_000.0, "rope_type": "default"},
    }
    return SimpleNamespace(**{**values, **changes})


def test_shape_follows_the_target_and_the_config():
    shape = drafter_shape(
        read_shape(target_config()), DrafterConfig(mask_token_id=3, num_layers=2, block_size=8), (1, 3)
    )
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (4, 2, 8, 48)
    assert (shape.rope_theta, shape.rms_norm_eps) == (1e5, 1e-5)
    assert (shape.vocab_size, shape.num_target_layers) == (61, 6)
    own = DrafterConfig(mask_token_id=3, num_heads=8, num_kv_heads=1, head_dim=16, intermediate_size=10)
    shape = drafter_shape(read_shape(target_config()), own, (1,))
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (8, 1, 16, 10)


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 1e5),
        ({"rope_parameters": None, "rope_theta": 500_000.0, "rope_scaling": None}, 5e5),
        # The target's own rotation may be scaled, partial or differ between layers: the drafter's is plain.
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, 1e4),
        ({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, 1e4),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}, 1e7),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4},
                    "full_attention": {"rope_theta": 1e6},
                }
            },
            1e6,
        ),
        ({"rope_parameters": {}}, 1e6),
    ],
)
def test_the_rotary_embedding_is_plain_with_the_base_of_full_attention(changes, theta):
    shape = drafter_shape(read_shape(target_config(**changes)), DrafterConfig(mask_token_id=3), (1,))
    assert shape.rope_theta == theta
    assert shape.rope_parameters() == {"rope_type": "default", "rope_theta": theta}


def test_a_setting_chooses_the_rotary_base():
    shape = drafter_shape(read_shape(target_config()), DrafterConfig(mask_token_id=3, rope_theta=5e5), (1,))
    assert shape.rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 48),
        # no dense MLP, and the width of one expert
        ({"intermediate_size": None}, 96),
        ({"intermediate_size": 16, "num_local_experts": 4}, 96),
        ({"intermediate_size": 80, "num_experts": 4}, 80),
    ],
)
def test_the_mlp_is_as_wide_as_the_targets_dense_one(changes, width):
    shape = drafter_shape(read_shape(target_config(**changes)), DrafterConfig(mask_token_id=3), (1,))
    assert shape.intermediate_size == width


@pytest.mark.parametrize(
    ("changes", "config", "ids", "message"),
    [
        ({}, {"mask_token_id": None}, (1,), "drafter.mask_token_id: not set"),
        ({}, {"mask_token_id": 61}, (1,), "drafter.mask_token_id: 61 is not allowed.*0 to 60"),
        ({}, {"num_heads": 3}, (1,), "drafter.num_kv_heads: 2 .* divisors of num_heads"),
        ({}, {"head_dim": 7}, (1,), "drafter.head_dim: 7"),
        ({}, {}, (1, 6), r"drafter.target_layer_ids: \[1, 6\] .* 0 to 5"),
        ({}, {}, (), "drafter.target_layer_ids"),
    ],
)
def test_impossible_shapes_are_rejected(changes, config, ids, message):
    with pytest.raises(UserError, match=message):
        drafter_shape(
            read_shape(target_config(**changes)), DrafterConfig(**{"mask_token_id": 3, **config}), ids
        )


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
    ],
)
def test_rotation_equals_that_of_transformers(scaling):
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    shape = replace(SHAPE, rope_scaling=scaling)
    config = Qwen3Config(
        hidden_size=32, num_attention_heads=6, head_dim=8, rope_parameters=shape.rope_parameters()
    )
    config.max_position_embeddings = shape.max_position_embeddings
    position = torch.tensor([0, 1, 7, 300, 5000])
    x_TNH = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(1))
    cos, sin = Qwen3RotaryEmbedding(config)(x_TNH, position[None])
    x_1NTH = x_TNH.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(x_1NTH, x_1NTH, cos, sin)
    rotation = rotary(shape, torch.device("cpu"))
    rotated = rotate(x_TNH, *rotary_tables(position, rotation, torch.float32))
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert (rotation.factor == 1.0) == (scaling.get("rope_type") != "yarn")

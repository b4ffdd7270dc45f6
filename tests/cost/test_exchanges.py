"""What devices send to each other: counted by hand, and by compilers."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

from lcjax import config as config_lib
from lcjax.cost import __main__ as command
from lcjax.cost import hlo
from lcjax.cost.chips import CHIPS, Topology
from lcjax.cost.compilers import devices
from lcjax.cost.exchanges import context_exchanges, received_from_slices, state_exchange
from lcjax.cost.program import collectives, program_cost
from lcjax.cost.resources import parameter_shapes
from lcjax.models import Decoder, LayerKind, head, preset
from lcjax.models.loss import cross_entropy
from lcjax.models.mixer import GatedDeltaNet
from lcjax.parallel.sharding import AXES, Mesh, make_mesh, mesh_sizes, slices_along
from lcjax.training import TrainConfig, compile_only, estimate

ALONE = dict.fromkeys(AXES, 1)
QWEN = preset("qwen3-8b").replace(dtype="bfloat16", remat="offload")
MILLION = 2**20


def exchanges(model, topology, mesh, length, rows=1, *, spans=ALONE, mfu=0.4):
    predicted = context_exchanges(
        model, mesh, ALONE | spans, Topology.parse(topology), length, rows, mfu
    )
    return {exchange.method: exchange for exchange in predicted}


def test_bytes_of_a_layer_follow_from_tokens_and_heads():
    predicted = exchanges(QWEN, "h100:8", Mesh(fsdp=1, context=8), MILLION)
    tokens = MILLION // 8
    queries, pair = 2 * 32 * 128 * tokens, 2 * 2 * 8 * 128 * tokens  # of 32 and 2 x 8 heads
    assert set(predicted) == {"ring", "all_to_all", "all_gather"}  # usp would be all_to_all
    # Keys and values forward and backward, their float32 gradients, and these back in 16 bits.
    assert predicted["ring"].sent == 7 * (pair + pair + 2 * pair) + pair
    # q, k, v and the output forward, again, and their gradients; and the sums of exponentials.
    heads, sums = 3 * (2 * queries + pair), 2 * 4 * 32 * tokens
    assert predicted["all_to_all"].sent == pytest.approx((heads + sums) * 7 / 8)
    assert predicted["all_gather"].sent == 7 * (pair + pair + 2 * pair)
    # Compilers counted 561 and 256 GB in the 36 layers of this step.
    assert 36 * predicted["ring"].sent == pytest.approx(561e9, rel=0.01)
    assert 36 * predicted["all_to_all"].sent == pytest.approx(256e9, rel=0.01)
    assert predicted["all_gather"].gathered == 7 * pair and predicted["all_to_all"].gathered == 0


def test_key_heads_are_repeated_for_more_devices():
    whole = exchanges(QWEN, "h200:16", Mesh(fsdp=1, context=16), MILLION)["all_to_all"].sent
    many = QWEN.replace(num_kv_heads=16)
    assert exchanges(many, "h200:16", Mesh(fsdp=1, context=16), MILLION)["all_to_all"].sent == whole


def test_heads_that_devices_cannot_share_have_no_exchange():
    model = QWEN.replace(num_heads=9, num_kv_heads=3)
    assert set(exchanges(model, "h100:8", Mesh(fsdp=1, context=8), 8192)) == {"ring", "all_gather"}


def test_times_are_bytes_over_the_links_of_a_domain_of_gpus():
    predicted = exchanges(QWEN, "h100:8", Mesh(fsdp=1, context=8), MILLION)
    link = CHIPS["h100"].link
    for exchange in predicted.values():
        assert exchange.seconds == pytest.approx(exchange.sent / link)
        assert exchange.exposed == pytest.approx(exchange.seconds) or exchange.method == "ring"
    ring = predicted["ring"]
    # All but the return of the gradients hides behind the products with keys of 131,072 tokens.
    assert ring.exposed == pytest.approx(ring.gathered / link)
    # With products as fast as this nothing hides behind them.
    exposed = exchanges(QWEN, "h100:8", Mesh(fsdp=1, context=8), MILLION, mfu=1e9)["ring"].exposed
    assert exposed == pytest.approx(ring.seconds)


def test_times_in_a_torus_follow_from_its_links():
    model = preset("llama2-7b").replace(dtype="bfloat16", remat="dots")
    cube, link = Mesh(fsdp=4, context=16), CHIPS["v5p"].link  # 4 x 4 chips share a text
    predicted = exchanges(model, "v5p:4x4x4", cube, 32_768, rows=4)
    pair = predicted["ring"].gathered
    assert pair == 2 * 2 * 4096 * 2048
    # Rings of 4 chips in two dimensions: four links gather, and a hop takes one.
    gathered = 15 * 4 * pair  # twice in 16 bits, and gradients in float32
    assert predicted["all_gather"].seconds == pytest.approx(gathered / (4 * link))
    assert predicted["ring"].seconds == pytest.approx((15 * 4 * pair + pair) / link)
    heads = 16 / 15 * predicted["all_to_all"].sent
    assert predicted["all_to_all"].seconds == pytest.approx(heads * 4 / 8 / link)
    # A line of 8 chips has no link from its end to its start.
    line = exchanges(model, "v5e:8x8", Mesh(fsdp=8, context=8), 32_768, rows=8)
    heads, link = 8 / 7 * line["all_to_all"].sent, CHIPS["v5e"].link
    assert line["all_to_all"].seconds == pytest.approx(heads * 8 / 4 / link)
    assert line["all_gather"].seconds == pytest.approx(line["all_gather"].sent / link)


def test_groups_of_neighbours_send_heads_within_a_domain_and_keys_between():
    mesh, spans = Mesh(fsdp=1, context=16), {"context": 2}
    predicted = exchanges(QWEN, "h100:8*2", mesh, MILLION, spans=spans)
    chip, usp = CHIPS["h100"], predicted["usp"]
    assert usp.group == 8
    ring = 4 * usp.gathered + usp.gathered  # one hop, and gradients back
    expected = ring / chip.network + (usp.sent - ring) / chip.link
    assert usp.seconds == pytest.approx(expected)
    returned = usp.gathered / chip.network  # gradients, as nothing is left to compute meanwhile
    assert usp.exposed == pytest.approx((usp.sent - ring) / chip.link + returned)
    assert usp.exposed < predicted["all_gather"].exposed
    half = predicted["all_to_all"].sent * 16 / 15 / 2  # to the other domain
    assert predicted["all_to_all"].seconds > half / chip.network


DELTA = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=8)
MIXED = preset("tiny").replace(
    num_layers=4, layers=(LayerKind(3, mixer=DELTA), LayerKind()), dtype="bfloat16", remat="full"
)


def test_layers_without_attention_do_not_change_the_exchange_of_those_with_it():
    mesh = Mesh(fsdp=1, context=8)
    alone = exchanges(MIXED.replace(layers=()), "v5p:2x2x2", mesh, 32_768)
    assert exchanges(MIXED, "v5p:2x2x2", mesh, 32_768) == alone
    every = MIXED.replace(mixer=DELTA, layers=())
    assert all(x.sent > 0 for x in exchanges(every, "v5p:2x2x2", mesh, 32_768).values())


def test_devices_send_a_map_of_the_state_in_layers_without_attention():
    topology, mesh = Topology.parse("h100:8"), Mesh(fsdp=1, context=4, tensor=2)
    sent = state_exchange(MIXED, mesh, ALONE, topology, rows=3)
    size = 3 * 2 * 16 * (16 + 8) * 4  # rows, half of the heads, float32
    assert sent.sent == 3 * 3 * size and sent.gathered == 3 * size
    assert sent.seconds == sent.exposed == pytest.approx(sent.sent / CHIPS["h100"].link)
    assert state_exchange(QWEN, mesh, ALONE, topology, rows=3) is None


@pytest.mark.slow
def test_the_map_of_the_state_has_the_bytes_that_a_compiler_counts():
    shape = Mesh(fsdp=1, context=4)
    mesh = make_mesh(shape, jax.devices()[:4])
    config = MIXED.replace(layers=(), num_layers=1, mixer=DELTA, remat="none", dtype="float32")
    model = Decoder(config, mesh)
    tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params, tokens):
        hidden = model.apply({"params": params}, tokens).hidden
        return cross_entropy(hidden, head(params, config), tokens, jnp.ones(tokens.shape))[0]

    sent = state_exchange(config, shape, ALONE, Topology.parse("h100:4"), rows=2).sent
    forward, both = (
        program_cost(jax.jit(function).lower(params, tokens), CHIPS["h100"]).traffic
        for function in (loss, jax.grad(loss))
    )
    assert forward["all-gather"].bytes == both["reduce-scatter"].bytes == sent / 2


def test_slices_sum_gradients_and_those_that_share_weights_send_them():
    model = preset("tinyllama-1.1b").replace(num_layers=2, dtype="bfloat16")
    weights = 2 * sum(leaf.size for leaf in parameter_shapes(model).values())
    norms = 2 * 5 * 2048  # whole on every device

    def received(mesh, **options):
        spans = ALONE | options.pop("spans")
        return received_from_slices(model, mesh.shape, spans, **options)

    copies = received(Mesh(data=2, fsdp=4), spans={"data": 2})
    assert copies == pytest.approx(weights / 4, rel=1e-3)
    assert received(Mesh(data=4, fsdp=4), spans={"data": 4}) == pytest.approx(1.5 * copies)
    adapters = {"trained": lambda path: path.startswith("head"), "accumulation": 3}
    heads = received(Mesh(data=2, fsdp=4), spans={"data": 2}, **adapters)
    assert heads == 3 * 2 * 32_000 * 2048 / 4
    shared = received(Mesh(fsdp=8), spans={"fsdp": 2})
    assert shared == pytest.approx(3 * (weights - norms) / 8, rel=2e-3)
    assert received(Mesh(fsdp=2, context=4), spans={"context": 2}) == 0


WORDS = ["--model.preset=llama2-7b", "--train.accumulation=1"]


def test_the_estimate_prints_exchanges_and_what_passes_between_slices(capsys):
    words = [*WORDS, "--topology=v5p:4x4x4", "--length=32768", "--mesh.context=16"]
    assert command.main([*words, "--train.batch_size=4"]) == 0
    table = capsys.readouterr().out.partition("sends in a layer")[2].splitlines()[1:4]
    assert [line.split()[0] for line in table] == ["ring", "all_to_all", "all_gather"]
    added = [float(line.split()[4].rstrip("%")) for line in table]
    assert added[0] > added[2] > added[1] > 0
    words = [*WORDS, "--topology=v5p:2x2x2*2", "--length=8192", "--train.batch_size=16"]
    assert command.main([*words, "--mesh.data=2"]) == 0
    output = capsys.readouterr().out
    assert "v5p:2x2x2*2: 16 devices, data=2 fsdp=8" in output
    line = "data over 2; a device receives 1.69 GB in an update, 0.27 s at 6.25 GB/s"
    assert f"between slices     {line}" in output
    assert command.main(words) == 2
    assert "set --mesh.data=2 --mesh.fsdp=-1, or let fsdp span" in capsys.readouterr().err


TINY = (
    *("--model.preset=tiny", "--train.batch_size=2", "--train.accumulation=1"),
    *("--data.length=1024", "--mesh.data=2", "--mesh.fsdp=1", "--mesh.context=4"),
)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_compilers_count_the_bytes_that_are_predicted(remat):
    """All strategies gather the same weights, so their difference is that of their exchanges."""
    predicted, compiled = {}, {}
    for method, group in {"ring": 1, "all_to_all": 1, "usp": 2, "all_gather": 1}.items():
        words = [*TINY, f"--model.context_parallel={method}", f"--model.remat={remat}"]
        words += [f"--model.context_group={group}"] if group > 1 else []
        config = config_lib.parse(TrainConfig, words)
        model = estimate.model_of(config).replace(dtype="float32")
        of_layer = exchanges(model, "h100:8", mesh_sizes(config.mesh, 8), 1024, 2)
        predicted[method] = model.num_layers * of_layer[method].sent
        text = compile_only.lower(config, model, make_mesh(config.mesh)).compile().as_text()
        compiled[method] = {kind: x.bytes for kind, x in collectives(text).items()}
    ring = compiled["ring"]
    assert predicted["ring"] == pytest.approx(ring["collective-permute"], rel=0.03)
    others = sum(ring.values()) - ring["collective-permute"]
    for method, counts in compiled.items():
        assert predicted[method] == pytest.approx(sum(counts.values()) - others, rel=0.03), method


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install -e '.[aot]'")
@pytest.mark.parametrize(
    ("words", "most"),
    # Gradients of the embedding and the head are float32, which is most of so small a model.
    [(["--mesh.data=2"], 1.7), (["--mesh.slices=[fsdp]"], 1.1)],
)
def test_libtpu_compiles_for_two_slices_and_sends_at_least_what_is_predicted(words, most):
    topology = Topology.parse("v5e:2x2*2")
    words = [*words, "--model.preset=tinyllama-1.1b", "--train.batch_size=8", "--data.length=1024"]
    config = config_lib.parse(TrainConfig, [*words, "--train.accumulation=1"])
    model = estimate.model_of(config).replace(num_layers=2)
    mesh = make_mesh(config.mesh, devices(topology))
    compiled = program_cost(compile_only.lower(config, model, mesh), topology.chip, mesh)
    predicted = received_from_slices(model, mesh.shape, slices_along(mesh))
    assert predicted < compiled.between.bytes < most * predicted
    assert compiled.between.overlapped > 0 and compiled.within > 0
    cells = command.column(compiled, command.roofline.Work(1.0, 1.0, predicted))
    least = 1e3 * compiled.between.bytes / topology.chip.network
    assert cells["between slices, ms"] == f"{least:,.3g}"
    assert cells["roofline bound, ms"].endswith("(network)")
    assert jax.devices()[0].platform == "cpu"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install -e '.[aot]'")
def test_libtpu_sends_keys_and_gradients_around_a_ring_during_the_products_of_a_hop():
    def is_step(x):  # a kernel, or a message with more than indices
        return x.name.startswith(("lcjax", "collective-permute")) and "s32[1,512]" not in x.shape

    words = [*TINY, "--data.length=2048", "--model.context_parallel=ring"]
    config = config_lib.parse(TrainConfig, words)
    sizes = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 128, "width": 256}
    model = estimate.model_of(config).replace(**sizes)
    mesh = make_mesh(config.mesh, devices(Topology.parse("v5e:2x4")))
    module = hlo.Module(compile_only.lower(config, model, mesh).compile().as_text())
    # In 2 layers the forward pass sends in 3 hops, and the backward pass loops over hops 1 and 2.
    for times, kernel, in_advance in ((6, "lcjax_forward", 2), (4, "lcjax_d_all", 3)):
        (order,) = (
            [x.name.partition(".")[0] for x in instructions]
            for name, count in module.computations()
            if count == times
            and (instructions := [x for x in module.instructions(name) if is_step(x)])
        )
        start, done = "collective-permute-start", "collective-permute-done"
        assert order.count(kernel) == 1 and order.count(start) == order.count(done)
        before, after = order[: order.index(kernel)], order[order.index(kernel) + 1 :]
        assert before.count(start) >= in_advance and after.count(done) == order.count(done)

"""The feed-forward part of a layer: an MLP, or a mixture of experts in its place."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lcjax.models.experts import Biases, Kernels, Load, mixture
from lcjax.models.layers import CollectTerms, Linear, Norm, matmul, multiply, unbox_offloaded
from lcjax.models.model_config import ModelConfig
from lcjax.models.tiles import over_local_tiles, tile_size, tokens_of_device
from lcjax.tree import flatten, nest

ACTIVATIONS = {
    "silu": nn.silu,
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(nn.relu(x)),
}


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020) if `gated_mlp`, else two projections with an activation between."""

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None
    by_tiles: bool = False  # whether x [B, T, D] may be computed by tiles of tokens

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        c = self.config
        if self.by_tiles and not self.is_initializing():
            tokens = math.prod(tokens_of_device(self.mesh, *x.shape[:2]))
            tile = tile_size(tokens, self._bytes_per_token(), self.mesh)
            if tile < tokens:
                return self._by_tiles(x, tile)
        activate = ACTIVATIONS[c.activation]

        def widen(name):
            return Linear((c.width,), (c.mlp_width,), c, c.mlp_bias, self.mesh, name=name)(x)

        hidden = activate(widen("gate")) * widen("up") if c.gated_mlp else activate(widen("up"))
        return Linear((c.mlp_width,), (c.width,), c, c.mlp_bias, self.mesh, name="down")(hidden)

    def _bytes_per_token(self) -> int:
        """Returns the bytes of a device for the results of a token's products, and gradients."""
        c = self.config
        width = c.mlp_width // (1 if self.mesh is None else self.mesh.shape["tensor"])
        return 2 * (3 if c.gated_mlp else 2) * width * c.compute_dtype().itemsize

    def _by_tiles(self, x: Float[Array, "B T D"], tile: int) -> Float[Array, "B T D"]:
        c, module = self.config, MLP(self.config, parent=None)
        weights = {
            # Codes and their scales stay as they are.
            path: weight if "/kernel/" in path else weight.astype(c.compute_dtype())
            for path, weight in flatten(unbox_offloaded(self.variables["params"])).items()
        }
        return over_local_tiles(
            lambda weights, x: module.apply({"params": weights}, x),
            *(nest(weights), x),
            path="/".join(self.path),
            tile=tile,
            mesh=self.mesh,
        )


class Kernel(nn.Module):
    """Creates a weight without applying it: [D, E] of a router, or [E, D, F] of all experts."""

    shape: tuple[int, ...]  # the axis before the last is the contracted one
    config: ModelConfig
    bias: bool = False

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "..."] | dict[str, jax.Array], jax.Array | None]:
        """Returns the weight and the bias [E] or [E, F]; None without `bias`."""
        spread = nn.initializers.normal(self.shape[-2] ** -0.5)
        storage, dtype = self.config.weights, jnp.dtype(self.config.param_dtype)
        init = functools.partial(spread, shape=self.shape, dtype=dtype)
        if storage is not None and len(self.shape) > 2:  # else a router or a gate
            floats = init
            init = lambda key: jax.vmap(storage.quantise)(floats(key))  # noqa: E731
        kernel, bias = self.param("kernel", init), None
        if self.bias:
            shape = (*self.shape[:-2], self.shape[-1])
            bias = self.param("bias", nn.initializers.zeros, shape, dtype)
        return kernel, bias


class ExpertKernels(nn.Module):
    """Creates the weights of all experts."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> tuple[Kernels, tuple[jax.Array | None, ...]]:
        """Returns the weights, and their biases in the same order."""
        c, count = self.config, self.config.experts.count
        wide, narrow = (count, c.width, c.expert_width), (count, c.expert_width, c.width)
        shapes = Kernels(gate=wide, up=wide, down=narrow)._asdict()
        made = (Kernel(shape, c, c.experts.bias, name=name)() for name, shape in shapes.items())
        kernels, biases = zip(*made, strict=True)
        return Kernels(*kernels), biases


class SparseMLP(nn.Module):
    """A mixture of experts in place of an MLP (`lcjax.models.experts`), and a shared expert."""

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None
    by_tiles: bool = False  # whether experts compute tiles of tokens

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        collect: CollectTerms | None = None,
    ) -> tuple[Float[Array, "B T D"], Load | None]:
        """Computes the mixture.

        Args:
          x: normed hidden states.
          hidden: the hidden states before the norm, for `Experts.branch_norms`.
          collect: the tokens of the load; None: no load is returned.

        Returns:
          The output, and the load or None.
        """
        c, experts, router_input, scales = self.config, self.config.experts, None, None
        shared = x if experts.shared_width is not None else None
        if experts.branch_norms:
            router_input = multiply(Norm(c, name="router_norm")(hidden), c.width**-0.5)
            x = Norm(c, name="experts_norm")(hidden)
        if experts.expert_scale:
            ones, dtype = nn.initializers.ones, jnp.dtype(c.param_dtype)
            scales = self.param("expert_scale", ones, (experts.count,), dtype)
        router, bias = Kernel((c.width, c.experts.count), c, c.experts.bias, name="router")()
        kernels, biases = ExpertKernels(c, name="experts")()
        biases = Biases(bias, *biases) if c.experts.bias else None
        y, load = mixture(
            *(x, router, kernels, collect and collect.counted, biases, router_input, scales),
            experts=experts,
            activate=ACTIVATIONS[c.activation],
            storage=c.weights,
            mesh=None if self.is_initializing() else self.mesh,
            by_tiles=self.by_tiles,
        )
        if shared is None:
            return y, load
        shared = self.shared(shared)
        if experts.branch_norms:
            y = Norm(c, name="experts_after_norm")(y)
            shared = Norm(c, name="shared_after_norm")(shared)
        return y + shared, load

    def shared(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the output of the shared expert, multiplied by its gate if it has one."""
        c, experts = self.config, self.config.experts
        config = c.replace(experts=None, mlp_width=experts.shared_width)
        with jax.named_scope("shared"):
            y = MLP(config, self.mesh, self.by_tiles, name="shared")(x)
            if not experts.shared_gate:
                return y
            kernel, _ = Kernel((c.width, 1), c, name="shared_gate")()
            return nn.sigmoid(matmul(x, kernel.astype(x.dtype))) * y

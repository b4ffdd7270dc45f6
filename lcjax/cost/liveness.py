"""The most bytes that are live at a time while a traced gradient is computed.

Operations run in the order of the trace, and an array is live until its last use. Compilers fuse
elementwise operations with the operations that use their results, so such a result is stored only
for what reads whole arrays from memory: products of matrices, kernels, loops. The body of a loop
has the memory of one iteration, and what it carries is updated in place.

Weights and their gradients are not counted where they are stored. If several devices share them, a
layer has gathered copies from their first use to their last, and a whole gradient until it is
reduced.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

# Operations on single elements, or that move elements.
_FUSED = frozenset(
    [
        *("abs", "add", "add_any", "and", "bitcast_convert_type", "broadcast_in_dim", "ceil"),
        *("clamp", "concatenate", "convert_element_type", "copy", "copy_p", "cos", "div"),
        *("dynamic_slice", "empty2", "eq", "erf", "exp", "exp2", "expand_dims", "expm1", "floor"),
        *("gather", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p"),
        *("logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "not", "or", "pad"),
        *("optimization_barrier", "population_count", "pow", "reduce_precision", "rem", "reshape"),
        *("rev", "round", "rsqrt", "select_n", "sharding_constraint", "shift_left"),
        *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "slice", "split", "sqrt"),
        *("square", "squeeze", "stack", "stop_gradient", "sub", "tan", "tanh", "transpose"),
        *("unstack", "xor"),
    ]
)
# Those of them that leave elements where they are.
_VIEWS = frozenset(
    [
        *("broadcast_in_dim", "copy", "expand_dims", "name", "optimization_barrier", "reshape"),
        *("sharding_constraint", "squeeze", "stop_gradient"),
    ]
)
_REDUCTIONS = ("reduce_", "arg", "cum")  # operands are fused with these; results are stored
_UPDATES = frozenset(["dynamic_update_slice", "scatter", "scatter-add"])  # of the first operand
_CALLEES = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # names of parameters that hold a callee


def peak_bytes(
    traced: ClosedJaxpr,
    num_weights: int,
    platform: str,
    *,
    gathers: bool,
    spread: Mapping[tuple[int, ...], int] = MappingProxyType({}),
) -> tuple[int, int]:
    """Returns the most bytes of intermediate results on the device and in its host.

    Args:
      traced: a program that computes gradients, which are all its results.
      num_weights: how many of its arguments are weights, the first ones.
      platform: `tpu`, `gpu` or `cpu`, of which branches for platforms are taken.
      gathers: whether devices share the weights.
      spread: shapes of arrays of which a device has a part, and the number of parts.
    """
    program = _Program("cuda" if platform == "gpu" else platform, gathers, spread)
    jaxpr = traced.jaxpr
    arguments = [program.argument(x.aval, i < num_weights) for i, x in enumerate(jaxpr.invars)]
    program.run(jaxpr, arguments, {x for x in jaxpr.outvars if isinstance(x, Var)})
    return program.peak(())


@dataclasses.dataclass(eq=False)
class _Array:
    """An array, which is in memory from step `start` to step `end` if it `is_stored`."""

    aval: Any
    inputs: Sequence["_Array"] = ()  # of the fused operation that computes it
    counted: bool = True  # else it is counted elsewhere
    is_weight: bool = False
    platforms: Sequence = ()  # of the index of a branch: the platforms of each branch
    start: int = -1
    end: int = -1

    def __post_init__(self):
        self.is_stored = not self.inputs
        self.on_host = getattr(self.aval, "memory_space", None) == jax.memory.Space.Host

    @property
    def nbytes(self) -> int:
        if not self.counted:
            return 0
        return math.prod(self.aval.shape) * getattr(self.aval.dtype, "itemsize", 4)  # 4: of a key

    def use(self, step: int) -> None:
        """Extends the lives of the stored arrays from which a step reads or computes this one."""
        for array in _sources(self, lambda x: not x.is_stored or x.start < 0):
            if array.is_stored:
                array.start = step if array.start < 0 else array.start
                array.end = max(array.end, step)

    def take_over(self, read: Sequence["_Array"]) -> None:
        """Takes the memory of an operand that is not used after this fused result is computed."""
        for array in _sources(self, lambda x: x is self or not x.is_stored):
            ends = array is not self and array.is_stored and array.end == self.start
            if ends and array.nbytes == self.nbytes and array not in read:
                array.end -= 1
                return


def _sources(array: _Array, continues) -> Iterator[_Array]:
    """Yields an array and those that it is computed from, as far as `continues(array)` is true."""
    arrays, seen = [array], set()
    while arrays:
        array = arrays.pop()
        if id(array) not in seen:
            seen.add(id(array))
            if continues(array):
                arrays += array.inputs
            yield array


@dataclasses.dataclass
class _Step:
    read: Sequence[_Array] = ()  # from memory
    fused: Sequence[_Array] = ()  # computed by the step itself
    updated: Sequence[_Array] = ()  # whose memory the step takes over
    written: Sequence[_Array] = ()
    after: Sequence[_Array] = ()  # written to memory that the step took over
    inside: tuple[int, int] = (0, 0)  # bytes that live within the step alone, and on the host

    @property
    def arrays(self) -> Iterator[_Array]:
        for array in (*self.read, *self.fused, *self.updated, *self.written, *self.after):
            yield from _sources(array, lambda _: True)


class _Program:
    """A program, or the body of a loop, as steps."""

    def __init__(self, platform: str, gathers: bool, spread: Mapping) -> None:
        self._settings = platform, gathers, spread
        self._steps: list[_Step] = []

    def argument(self, aval: Any, is_weight: bool = False, platforms: Sequence = ()) -> _Array:
        """Returns an argument, which the caller counts; a weight is a copy if it is gathered."""
        array = _Array(aval, counted=False, is_weight=is_weight, platforms=platforms)
        return _Array(aval, (array,), is_weight=True) if is_weight and self._settings[1] else array

    def peak(self, outputs: Sequence[_Array]) -> tuple[int, int]:
        """Returns the most live bytes on the device and on its host; `outputs` live to the end."""
        steps = [*self._steps, _Step(read=outputs)]
        for step in steps:
            for array in (*step.read, *step.updated):
                array.is_stored = True
        for now, step in enumerate(steps):
            for array in (*step.read, *step.fused):
                array.use(now)
            for array in step.updated:
                array.use(max(now - 1, 0))
            for begin, results in ((now, step.written), (now + 1, step.after)):
                for array in results:
                    array.start, array.end = begin, max(array.end, begin)
        arrays = {id(array): array for step in steps for array in step.arrays}
        stored = [x for x in arrays.values() if x.is_stored and x.start >= 0 and x.nbytes]
        live = np.zeros((len(steps) + 2, 2), int)
        for array in stored:
            array.take_over(steps[min(array.start, len(steps) - 1)].read)
        for array in stored:
            nbytes, place = self._nbytes(array), int(array.on_host)
            live[array.start, place] += nbytes
            live[array.end + 1, place] -= nbytes
        live = live.cumsum(0)
        live[: len(steps)] += [step.inside for step in steps]
        return tuple(live.max(0).tolist())

    def _nbytes(self, array: _Array) -> int:
        """Returns the bytes of an array on the device."""
        platform, _, spread = self._settings
        # XLA for CPUs computes with floats of 16 bits as float32.
        twice = platform == "cpu" and _is_half(array.aval)
        return (2 if twice else 1) * array.nbytes // spread.get(array.aval.shape, 1)

    def run(self, jaxpr: Jaxpr, arguments: Sequence[_Array], gradients: set[Var]) -> list[_Array]:
        """Adds the operations of a jaxpr; returns its results.

        Args:
          jaxpr: the jaxpr.
          arguments: its arguments.
          gradients: its variables that are gradients of weights, which the caller counts.
        """
        values = dict(zip(jaxpr.invars, arguments, strict=True))
        values |= {variable: _Array(variable.aval, counted=False) for variable in jaxpr.constvars}
        gradients = _with_parts(jaxpr, gradients)

        def read(atom):
            literal = isinstance(atom, Literal)
            return _Array(atom.aval, counted=False) if literal else values[atom]

        for equation in jaxpr.eqns:
            counted = [variable not in gradients for variable in equation.outvars]
            results = self._run_equation(equation, list(map(read, equation.invars)), counted)
            values |= dict(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _run_equation(self, equation, operands, counted) -> list[_Array]:
        name, params = equation.primitive.name, equation.params
        avals = [variable.aval for variable in equation.outvars]
        if name == "platform_index":
            return [_Array(avals[0], counted=False, platforms=params["platforms"])]
        if name in _VIEWS and [x.size for x in avals] == [x.aval.size for x in operands]:
            return operands
        if name in _FUSED:
            is_weight = any(x.is_weight for x in operands) and all(
                x.is_weight or x.aval.size == 1 or x.aval.dtype.kind in "biu" for x in operands
            )
            return [_Array(aval, operands, is_weight=is_weight) for aval in avals]
        if name == "scan":
            sizes = params["num_consts"], params["num_carry"]
            return self._loop(params["jaxpr"].jaxpr, sizes, operands, avals, counted)
        if name == "while":
            sizes, operands = (
                (params["body_nconsts"], len(avals)),
                operands[params["cond_nconsts"] :],
            )
            return self._loop(params["body_jaxpr"].jaxpr, sizes, operands, avals, counted)
        if name == "cond":
            return self._branches(params["branches"], operands, avals, counted)
        if (callee := _callee(equation)) is not None:
            return self.run(callee, operands, _marked(callee, counted))
        results = [_Array(aval) for aval in avals]
        if name.startswith(_REDUCTIONS):
            step = _Step(fused=operands, written=results)
        elif name in _UPDATES:
            step = _Step(updated=operands[:1], fused=operands[1:], after=results)
        elif name == "device_put":  # meanwhile, the next one is on its way
            moved = sum(x.nbytes for x in results if not x.on_host)
            step = _Step(read=operands, written=results, inside=(moved, 0))
        else:
            step = _Step(read=operands, written=results)
        self._steps.append(step)
        return results

    def _loop(self, body, sizes, operands, avals, counted) -> list[_Array]:
        """Adds a loop, whose results are what it carries and then a stack of each other result."""
        consts, carries = sizes
        inner = _Program(*self._settings)
        arguments = [
            inner.argument(variable.aval, x.is_weight, x.platforms)
            for variable, x in zip(body.invars, operands, strict=True)
        ]
        start = [_Array(variable.aval) for variable in body.invars[consts : consts + carries]]
        arguments[consts : consts + carries] = start
        inner._steps.append(_Step(written=start))
        results = inner.run(body, arguments, _marked(body, counted))
        inner._steps.append(_Step(fused=results[carries:]))
        # What every iteration reads whole is gathered before the loop, and its gradient is a sum
        # in memory. Other weights are stacks of layers, of which inner loops gather one at a time.
        # What only the branches of other platforms use is left out.
        read = {id(array) for step in inner._steps for array in step.read}
        used = {id(array) for step in inner._steps for array in step.arrays}
        whole = [x for x in arguments[:consts] if id(x) in (read if x.is_weight else used)]
        shapes = {x.aval.shape for x in whole}
        for array in whole:
            array.counted = False
        for argument, result, is_counted in zip(start, results, counted[:carries], strict=False):
            if not is_counted and argument.aval.shape not in shapes:
                argument.counted = result.counted = False
        pairs = list(zip(operands, arguments, strict=True))
        stacked = [x for x in operands[consts + carries :] if not x.is_weight]

        def output(aval, is_counted, result):
            if not result.is_weight:
                return _Array(aval, counted=is_counted, platforms=result.platforms)
            parts = {id(x) for x in _sources(result, lambda _: True)}  # no copies of weights
            return _Array(
                aval, [x for x, argument in pairs if id(argument) in parts], is_weight=True
            )

        outputs = list(map(output, avals, counted, results))
        self._steps.append(
            _Step(
                read=[*(x for x, argument in pairs if argument in whole), *stacked],
                updated=operands[consts : consts + carries],
                written=outputs[carries:],
                after=outputs[:carries],
                inside=inner.peak(results[:carries]),
            )
        )
        return outputs

    def _branches(self, branches, operands, avals, counted) -> list[_Array]:
        """Adds the operations of the platform's branch, or the largest branch as one step."""
        index, *operands = operands
        for number, names in enumerate(index.platforms):
            if names is None or self._settings[0] in names:
                body = branches[number].jaxpr
                return self.run(body, operands, _marked(body, counted))
        peaks = []
        for branch in branches:
            inner, variables = _Program(*self._settings), branch.jaxpr.invars
            arguments = [
                inner.argument(variable.aval, platforms=x.platforms)
                for variable, x in zip(variables, operands, strict=True)
            ]
            peaks.append(inner.peak(inner.run(branch.jaxpr, arguments, set())))
        results = [_Array(aval) for aval in avals]
        device, host = map(max, zip(*peaks, strict=True))
        inside = max(0, device - sum(x.nbytes for x in results)), host
        self._steps.append(_Step(read=operands, written=results, inside=inside))
        return results


def _is_half(aval: Any) -> bool:
    return aval.dtype.itemsize == 2 and jnp.issubdtype(aval.dtype, jnp.floating)


def _callee(equation: Any) -> Jaxpr | None:
    """Returns the jaxpr that an equation calls once, or None."""
    if equation.primitive.name in ("pallas_call", "scan", "while", "cond"):
        return None
    callee = next((equation.params[x] for x in _CALLEES if x in equation.params), None)
    return getattr(callee, "jaxpr", callee)


def _marked(jaxpr: Jaxpr, counted: Sequence[bool]) -> set[Var]:
    """Returns the results of a jaxpr that are gradients of weights."""
    pairs = zip(jaxpr.outvars, counted, strict=True)
    return {x for x, is_counted in pairs if not is_counted and isinstance(x, Var)}


def _with_parts(jaxpr: Jaxpr, gradients: set[Var]) -> set[Var]:
    """Returns gradients of weights with those of which they are made up in a jaxpr."""
    gradients = set(gradients)
    for equation in reversed(jaxpr.eqns):
        counted = [variable not in gradients for variable in equation.outvars]
        if all(counted):
            continue
        parts, callee = equation.invars, _callee(equation)
        if callee is not None:
            inner = _with_parts(callee, _marked(callee, counted))
            pairs = zip(callee.invars, equation.invars, strict=True)
            parts = [operand for argument, operand in pairs if argument in inner]
        elif equation.primitive.name not in _FUSED | _UPDATES:
            continue
        gradients |= {x for x in parts if isinstance(x, Var)}
    return gradients

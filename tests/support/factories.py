"""Factories of trees as real libraries make them: optimiser states, layers, solvers,
distributions. No test is here.

`LIBRARIES[name]()` gives the factories of a library, each of which makes a tree of a
key. Another process, with another order of sets, makes the same tree of the same key;
and of another key a tree of the same structure.
"""

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np


Factory = Callable[[jax.Array], Any]
LIBRARIES: dict[str, Callable[[], dict[str, Factory]]] = {}
# Calls that may refuse what a process saved, in so many words. They never exchange it.
MAY_REFUSE = {
    # It sorts children by the hashes of their names.
    "numpyro": ("load", "splice", "init", "graft"),
    # How a class is flattened hangs on which of its leaves are arrays.
    "distrax": ("graft",),
}


def _library(of: Callable[[], dict[str, Factory]]) -> Callable[[], dict[str, Factory]]:
    LIBRARIES[of.__name__[1:]] = of
    return of


# What pip calls them, if that is another name. A new JAX needs a newer haliax than the
# last one that was released.
_PACKAGES = {"nnx": "flax", "linen": "flax", "haliax": "haliax>=1.4.dev0"}


def packages() -> list[str]:
    """What has to be installed for all of them."""
    return [*dict.fromkeys(_PACKAGES.get(x, x) for x in LIBRARIES)]


def version(library: str) -> str:
    try:
        name = re.split(r"\W", _PACKAGES.get(library, library))[0]
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not here"


def factories(libraries: list[str]) -> Iterator[tuple[str, str, Factory | Exception]]:
    """Library, name and factory; or, with the name `*`, why a library has none here."""
    for library in libraries:
        try:
            made = LIBRARIES[library]()
        except Exception as e:  # Some packages fail with a JAX that they do not know.
            yield library, "*", e
        else:
            for name, make in made.items():
                yield library, name, make


def _params(key: jax.Array) -> dict[str, Any]:
    w, b = jr.normal(key, (4, 4)), jr.normal(jr.fold_in(key, 1), (4,))
    return {"dense": {"w": w, "b": b}, "scales": [b + 1, b + 2]}


# ---- Optax.


def _big(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _group(params: Any) -> Any:
    return jax.tree.map(lambda x: "big" if x.ndim > 1 else "small", params)


def _always(*args: Any, **kwargs: Any) -> Any:
    return jnp.asarray(True)


@_library
def _optax() -> dict[str, Factory]:
    import optax
    import optax.contrib as contrib

    rates: dict[str, Any] = {
        "constant": optax.constant_schedule(0.1),
        "cosine": optax.cosine_decay_schedule(0.1, 100),
        "warmup cosine": optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100),
        "one cycle": optax.cosine_onecycle_schedule(100, 0.1),
        "exponential": optax.exponential_decay(0.1, 10, 0.5),
        "piecewise": optax.piecewise_constant_schedule(0.1, {10: 0.5, 20: 0.1}),
        "joined": optax.join_schedules(
            [optax.linear_schedule(0.0, 0.1, 5), optax.constant_schedule(0.1)], [5]
        ),
    }
    names = (
        "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad "
        "fromage lamb lars lbfgs lion nadam nadamw novograd optimistic_adam_v2 "
        "optimistic_gradient_descent polyak_sgd radam rmsprop rprop sgd sign_sgd sm3 "
        "yogi"
    ).split()
    made: dict[str, Any] = {x: getattr(optax, x)(0.1) for x in names}
    names = (
        "acprop ademamix adopt cocob dadapt_adamw dog dowg madgrad momo momo_adam muon "
        "prodigy reduce_on_plateau schedule_free_adamw schedule_free_sgd "
        "simplified_ademamix sophia"
    ).split()
    of_no_rate = "cocob dadapt_adamw dog dowg momo momo_adam prodigy reduce_on_plateau"
    for name in names:
        if hasattr(contrib, name):  # Releases of optax differ in these.
            call = getattr(contrib, name)
            made[name] = call() if name in of_no_rate.split() else call(0.1)
    adam, sgd = optax.adam(1e-3), optax.sgd(0.1, momentum=0.9)
    made |= {
        "noisy_sgd": optax.noisy_sgd(0.1),
        "adamw bfloat16": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
        "sgd nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
        "rmsprop centred": optax.rmsprop(0.1, centered=True, momentum=0.9),
        "adam of a schedule": optax.adam(rates["cosine"]),
        "chain": optax.chain(optax.clip_by_global_norm(1.0), adam, optax.scale(-1.0)),
        "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("adam", adam)),
        "chain of chains": optax.chain(optax.chain(adam, sgd), optax.chain(sgd)),
        "multi_transform": optax.multi_transform({"big": adam, "small": sgd}, _group),
        "masked": optax.masked(adam, _big),
        "MultiSteps": optax.MultiSteps(adam, 4),
        "MultiSteps of a schedule": optax.MultiSteps(adam, lambda step: step + 1),
        "apply_if_finite": optax.apply_if_finite(adam, 3),
        "conditionally_mask": optax.conditionally_mask(adam, _always),
        "conditionally_transform": optax.conditionally_transform(adam, _always),
        "flatten": optax.flatten(adam),
        "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(1e-3),
        "inject a schedule": optax.inject_hyperparams(optax.sgd)(rates["cosine"]),
        "inject_stateful": optax.inject_stateful_hyperparams(optax.sgd)(0.1),
        "lookahead": optax.lookahead(sgd, 5, 0.5),
        "add_noise": optax.add_noise(0.1, 0.5, key=3),
        "ema": optax.ema(0.9),
        "trace": optax.trace(0.9),
        "zero_nans": optax.zero_nans(),
        "freeze": optax.set_to_zero(),
        "backtracking": optax.chain(sgd, optax.scale_by_backtracking_linesearch(5)),
        "zoom": optax.chain(sgd, optax.scale_by_zoom_linesearch(5)),
        "keep_params_nonnegative": optax.keep_params_nonnegative(),
        "apply_every": optax.apply_every(3),
        "differentially private": contrib.differentially_private_aggregate(1.0, 0.1, 3),
        "mechanize": contrib.mechanize(sgd),
        "sam": contrib.sam(sgd, optax.chain(contrib.normalize(), optax.sgd(0.05))),
        "split_real_and_imaginary": contrib.split_real_and_imaginary(adam),
    }
    made |= {
        f"scheduled, {name}": optax.scale_by_schedule(rate)
        for name, rate in rates.items()
    }

    def state(optimiser: Any) -> Factory:
        def make(key: jax.Array) -> Any:
            params = _params(key)
            if optimiser is made["lookahead"]:
                params = optax.LookaheadParams.init_synced(params)
            return {"params": params, "state": optimiser.init(params)}

        return make

    out: dict[str, Factory] = {name: state(x) for name, x in made.items()}
    # The optimiser itself, which is a named tuple of closures.
    out["adam beside its state"] = lambda key: (adam, adam.init(_params(key)))
    return out


# ---- Equinox.


class _Block(eqx.Module):
    """What people write: layers, a State, functions, and settings of any kind."""

    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.BatchNorm
    activation: Callable
    dropout: eqx.nn.Dropout
    table: np.ndarray
    dtype: Any = eqx.field(static=True)
    settings: dict = eqx.field(static=True)

    def __init__(self, key: jax.Array):
        self.attention = eqx.nn.MultiheadAttention(2, 4, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="ema")
        self.activation = jax.nn.gelu
        self.dropout = eqx.nn.Dropout(0.1)
        self.table = np.arange(3.0)
        self.dtype = jnp.bfloat16
        self.settings = {"axes": ("a", -1), "names": {"x", "y", "z"}, "f": jax.nn.relu}


@_library
def _equinox() -> dict[str, Factory]:
    nn = eqx.nn

    def stack(key: jax.Array) -> Any:
        layers: list[Any] = [nn.Linear(4, 4, key=key), nn.Lambda(jax.nn.relu)]
        return nn.Sequential([*layers, nn.Dropout(0.5), nn.LayerNorm(4)])

    def shared(key: jax.Array) -> Any:
        embed = nn.Embedding(4, 4, key=key)
        pair = embed, nn.Linear(4, 4, use_bias=False, key=key)
        return nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

    def spectral(key: jax.Array) -> Any:
        make = lambda k: nn.SpectralNorm(nn.Linear(4, 4, key=k), "weight", key=k)
        return nn.make_with_state(make)(key)

    def norms(key: jax.Array) -> Any:
        make = lambda: [nn.BatchNorm(4, "b", mode=m) for m in ("ema", "batch", "ema")]
        model, state = nn.make_with_state(make)()
        mean = state.get(model[0].ema_state_index)
        return model, state.set(
            model[0].ema_state_index, jax.tree.map(lambda x: x + jr.normal(key), mean)
        )

    def counter(key: jax.Array) -> Any:
        index = nn.StateIndex(jr.normal(key, (3,)))
        return index, nn.State(index)

    def trained(key: jax.Array) -> Any:
        import optax

        model = nn.MLP(4, 4, 4, 2, key=key)
        return model, optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))

    dropped = lambda key: nn.inference_mode(stack(key))
    return {
        "Linear": lambda key: nn.Linear(4, 4, key=key),
        "Linear of a scalar": lambda key: nn.Linear("scalar", 4, key=key),
        "Linear bfloat16": lambda key: nn.Linear(4, 4, dtype=jnp.bfloat16, key=key),
        "MLP": lambda key: nn.MLP(4, 4, 4, 2, key=key),
        "MLP of tanh": lambda key: nn.MLP(4, 4, 4, 2, jnp.tanh, key=key),
        "Sequential": stack,
        "Sequential in inference": dropped,
        "Conv1d": lambda key: nn.Conv1d(4, 4, 3, padding="SAME", key=key),
        "Conv2d": lambda key: nn.Conv2d(2, 3, 3, padding=((1, 1), (0, 2)), key=key),
        "ConvTranspose2d": lambda key: nn.ConvTranspose2d(2, 3, 3, key=key),
        "Embedding": lambda key: nn.Embedding(4, 4, key=key),
        "GRUCell": lambda key: nn.GRUCell(4, 4, key=key),
        "LSTMCell": lambda key: nn.LSTMCell(4, 4, key=key),
        "MultiheadAttention": lambda key: nn.MultiheadAttention(2, 4, key=key),
        "RotaryPositionalEmbedding": lambda key: nn.RotaryPositionalEmbedding(4),
        "LayerNorm": lambda key: nn.LayerNorm((2, 3)),
        "RMSNorm": lambda key: nn.RMSNorm(3),
        "GroupNorm": lambda key: nn.GroupNorm(2, 4),
        "PReLU": lambda key: nn.PReLU(0.3),
        "pools": lambda key: [nn.MaxPool2d(2), nn.AdaptiveMaxPool1d(3)],
        "WeightNorm": lambda key: nn.WeightNorm(nn.Linear(4, 4, key=key)),
        "Shared": shared,
        "SpectralNorm with its State": spectral,
        "BatchNorms with their State": norms,
        "StateIndex": counter,
        "a block with its State": lambda key: nn.make_with_state(_Block)(key),
        "a block without its State": _Block,
        "Partial": lambda key: jax.tree_util.Partial(jax.nn.relu, jr.normal(key, (2,))),
        "layers by vmap": lambda key: eqx.filter_vmap(lambda k: nn.Linear(4, 4, key=k))(
            jr.split(key, 3)
        ),
        "a filtered function": lambda key: eqx.filter_jit(nn.Linear(4, 4, key=key)),
        "MLP and Adam": trained,
    }


# ---- Flax.


@_library
def _linen() -> dict[str, Factory]:
    import flax
    import optax
    from flax import linen
    from flax.training.train_state import TrainState

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(3)(x))
            return linen.Dense(2)(linen.relu(x))

    cell = linen.LSTMCell(4)
    net, x = Net(), jnp.ones((2, 3))

    def train(key: jax.Array) -> Any:
        params = net.init(key, x)["params"]
        return TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(0.1))

    @flax.struct.dataclass
    class Settings:
        w: Any
        heads: int = flax.struct.field(pytree_node=False)
        dtype: Any = flax.struct.field(pytree_node=False, default=jnp.bfloat16)

    return {
        "variables": lambda key: net.init(key, x),
        "FrozenDict": lambda key: flax.core.freeze(net.init(key, x)),
        "TrainState": train,
        "attention": lambda key: linen.MultiHeadDotProductAttention(2).init(
            key, jnp.ones((1, 3, 4))
        ),
        "a carry": lambda key: cell.initialize_carry(key, (2, 3)),
        "boxed": lambda key: linen.Dense(
            3, kernel_init=linen.with_partitioning(linen.initializers.ones, ("a", None))
        ).init(key, x),
        "struct": lambda key: Settings(jr.normal(key, (3,)), 8),
    }


@_library
def _nnx() -> dict[str, Factory]:
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any):
            self.first = nnx.Linear(3, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            self.activation = nnx.relu

    def net(key: jax.Array) -> Any:
        return Net(nnx.Rngs(key))

    def optimiser(key: jax.Array) -> Any:
        return nnx.state(nnx.Optimizer(net(key), optax.adam(1e-3), wrt=nnx.Param))

    return {
        "state": lambda key: nnx.state(net(key)),
        "params": lambda key: nnx.state(net(key), nnx.Param),
        "split": lambda key: nnx.split(net(key)),
        "pure": lambda key: nnx.to_pure_dict(nnx.state(net(key))),
        "Module": net,
        "Rngs": nnx.Rngs,
        "Optimizer": optimiser,
        "LoRA": lambda key: nnx.state(nnx.LoRA(3, 2, 4, rngs=nnx.Rngs(key))),
        "attention": lambda key: nnx.state(
            nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(key))
        ),
    }


# ---- Solvers.


def _field(t: Any, y: Any, args: Any) -> Any:
    return -y


def _residual(y: Any, args: Any) -> Any:
    return y**2 - 2


@_library
def _diffrax() -> dict[str, Factory]:
    import diffrax as dx

    def solution(**options: Any) -> Factory:
        def make(key: jax.Array) -> Any:
            term, y0 = dx.ODETerm(_field), jr.normal(key, (2,))
            return dx.diffeqsolve(term, dx.Tsit5(), 0.0, 1.0, 0.1, y0, **options)

        return make

    times = lambda: jnp.linspace(0.0, 1.0, 5)
    path = lambda key: jr.normal(key, (5, 2))

    def brownian(area: Any) -> Factory:
        return lambda key: dx.VirtualBrownianTree(0.0, 1.0, 1e-2, (2,), key, area)

    def cubic(key: jax.Array) -> Any:
        return dx.CubicInterpolation(
            times(), dx.backward_hermite_coefficients(times(), path(key))
        )

    return {
        "solvers": lambda key: [dx.Tsit5(), dx.Dopri8(), dx.Kvaerno5(), dx.Heun()],
        "half solver": lambda key: dx.HalfSolver(dx.ImplicitEuler()),
        "PIDController": lambda key: dx.PIDController(1e-3, 1e-6, pcoeff=0.3),
        "controllers": lambda key: [dx.ConstantStepSize(), dx.StepTo(times())],
        "adjoints": lambda key: [dx.RecursiveCheckpointAdjoint(4), dx.DirectAdjoint()],
        "ODETerm": lambda key: dx.ODETerm(_field),
        "ODETerm of an MLP": lambda key: dx.ODETerm(eqx.nn.MLP(2, 2, 4, 1, key=key)),
        "MultiTerm": lambda key: dx.MultiTerm(
            dx.ODETerm(_field),
            dx.ControlTerm(_field, dx.UnsafeBrownianPath((2,), key)),
        ),
        "SaveAt": lambda key: dx.SaveAt(ts=times(), dense=True),
        "Event": lambda key: dx.Event(_residual),
        "VirtualBrownianTree": brownian(dx.BrownianIncrement),
        "Levy area": brownian(dx.SpaceTimeLevyArea),
        "UnsafeBrownianPath": lambda key: dx.UnsafeBrownianPath((2,), key),
        "LinearInterpolation": lambda key: dx.LinearInterpolation(times(), path(key)),
        "CubicInterpolation": cubic,
        "Solution": solution(),
        "dense Solution": solution(saveat=dx.SaveAt(dense=True), max_steps=16),
    }


@_library
def _lineax() -> dict[str, Factory]:
    import lineax as lx

    matrix = lambda key: jr.normal(key, (3, 3)) + 4 * jnp.eye(3)
    positive = lambda key: lx.MatrixLinearOperator(
        matrix(key) @ matrix(key).T, lx.positive_semidefinite_tag
    )

    def tagged(key: jax.Array) -> Any:
        tags = {lx.symmetric_tag, lx.positive_semidefinite_tag, lx.tridiagonal_tag}
        return lx.MatrixLinearOperator(matrix(key), frozenset(tags))

    def function(key: jax.Array) -> Any:
        weight = matrix(key)
        like = jax.ShapeDtypeStruct((3,), jnp.float32)
        return lx.FunctionLinearOperator(jax.tree_util.Partial(jnp.dot, weight), like)

    def solution(key: jax.Array) -> Any:
        operator = lx.MatrixLinearOperator(matrix(key))
        return lx.linear_solve(operator, jnp.ones(3), lx.LU())

    return {
        "matrix": lambda key: lx.MatrixLinearOperator(matrix(key)),
        "tags": tagged,
        "diagonal": lambda key: lx.DiagonalLinearOperator(jr.normal(key, (3,))),
        "identity": lambda key: lx.IdentityLinearOperator(
            jax.ShapeDtypeStruct((3,), jnp.float32)
        ),
        "tridiagonal": lambda key: lx.TridiagonalLinearOperator(
            *(jr.normal(key, (n,)) for n in (3, 2, 2))
        ),
        "function": function,
        "sum": lambda key: lx.MatrixLinearOperator(matrix(key)) + positive(key),
        "solvers": lambda key: [lx.LU(), lx.QR(), lx.SVD(), lx.CG(1e-3, 1e-3)],
        "AutoLinearSolver": lambda key: lx.AutoLinearSolver(well_posed=None),
        "Solution": solution,
        "state of Cholesky": lambda key: lx.Cholesky().init(positive(key), {}),
    }


@_library
def _optimistix() -> dict[str, Factory]:
    import optax
    import optimistix as ox

    tol = {"rtol": 1e-3, "atol": 1e-6}
    solvers: dict[str, Any] = {
        name: getattr(ox, name)(**tol)
        for name in (
            "BFGS DFP LBFGS Newton Chord Bisection Dogleg FixedPointIteration "
            "GaussNewton GoldenSearch IndirectLevenbergMarquardt LevenbergMarquardt "
            "NelderMead NonlinearCG"
        ).split()
        if hasattr(ox, name)
    }
    solvers["GradientDescent"] = ox.GradientDescent(0.1, **tol)
    solvers["OptaxMinimiser"] = ox.OptaxMinimiser(optax.adam(0.1), **tol)
    solvers["BestSoFar"] = ox.BestSoFarMinimiser(solvers["BFGS"])
    out: dict[str, Factory] = {
        name: lambda key, solver=solver: (solver, jr.normal(key, (2,)))
        for name, solver in solvers.items()
    }

    def solution(solver: Any, call: Any, f: Any = _residual) -> Factory:
        start = lambda key: 1.5 + 0.1 * jr.normal(key, (2,))
        return lambda key: call(f, solver, start(key), throw=False)

    def total(y: Any, args: Any) -> Any:
        return jnp.sum(_residual(y, args) ** 2)

    squares, minimise = ox.least_squares, ox.minimise
    return out | {
        "root by Newton": solution(solvers["Newton"], ox.root_find),
        "squares by Gauss-Newton": solution(solvers["GaussNewton"], squares),
        "squares by L-M": solution(solvers["LevenbergMarquardt"], squares),
        "minimum by BFGS": solution(solvers["BFGS"], minimise, total),
        "minimum by Adam": solution(solvers["OptaxMinimiser"], minimise, total),
    }


# ---- Arrays and parameters that are more than arrays.


@_library
def _haliax() -> dict[str, Factory]:
    import haliax as hax

    embed, mlp, layers = hax.Axis("embed", 4), hax.Axis("mlp", 4), hax.Axis("layers", 2)
    named = lambda key: hax.random.normal(key, (embed, mlp))
    linear = lambda key: hax.nn.Linear.init(embed, mlp, key=key)
    return {
        "NamedArray": named,
        "Axis beside it": lambda key: {"axis": embed, "w": named(key)},
        "Linear": linear,
        "LayerNorm": lambda key: hax.nn.LayerNorm.init(embed),
        "Embedding": lambda key: hax.nn.Embedding.init(mlp, embed, key=key),
        "MLP": lambda key: hax.nn.MLP.init(embed, mlp, 8, 2, key=key),
        "Dropout": lambda key: hax.nn.Dropout(0.1),
        "Stacked": lambda key: hax.nn.Stacked.init(layers, hax.nn.Linear)(
            embed, embed.alias("out"), key=jr.split(key, 2)
        ),
    }


@_library
def _quax() -> dict[str, Factory]:
    import quax
    from quax.examples import lora, zero

    def loraify(key: jax.Array) -> Any:
        return lora.loraify(eqx.nn.Linear(3, 4, key=key), rank=2, key=key)

    return {
        "LoRA": loraify,
        "zero": lambda key: {
            "w": jr.normal(key, (2,)),
            "z": zero.Zero((2,), jnp.int32),
        },
        "quaxify": lambda key: quax.quaxify(eqx.nn.Linear(3, 4, key=key)),
    }


@_library
def _paramax() -> dict[str, Factory]:
    import paramax as px

    linear = lambda key: eqx.nn.Linear(3, 4, key=key)

    def normed(key: jax.Array) -> Any:
        layer = linear(key)
        return eqx.tree_at(lambda x: x.weight, layer, replace_fn=px.WeightNormalization)

    return {
        "non_trainable": lambda key: px.non_trainable(linear(key)),
        "NonTrainable": lambda key: px.NonTrainable(jr.normal(key, (3,))),
        "Parameterize": lambda key: px.Parameterize(jnp.exp, jr.normal(key, (3,))),
        "WeightNormalization": normed,
        "increasing": lambda key: px.Parameterize(jnp.exp, {"a": jr.normal(key, (3,))}),
    }


@_library
def _flowjax() -> dict[str, Factory]:
    from flowjax import bijections as bi, distributions as di, flows

    base = lambda: di.Normal(jnp.zeros(2))
    spline = lambda: bi.RationalQuadraticSpline(knots=4, interval=2)
    flow: dict[str, Any] = {
        "coupling": flows.coupling_flow,
        "autoregressive": flows.masked_autoregressive_flow,
        "block autoregressive": flows.block_neural_autoregressive_flow,
        "planar": flows.planar_flow,
        "triangular spline": flows.triangular_spline_flow,
    }
    out: dict[str, Factory] = {
        name: lambda key, call=call: call(key, base_dist=base())
        for name, call in flow.items()
    }
    return out | {
        "coupling of splines": lambda key: flows.coupling_flow(
            key, base_dist=base(), transformer=spline()
        ),
        "Normal": lambda key: di.Normal(jr.normal(key, (2,)), jnp.ones(2)),
        "StudentT": lambda key: di.StudentT(jnp.ones(2), jr.normal(key, (2,))),
        "mixture": lambda key: di.VmapMixture(
            eqx.filter_vmap(di.Normal)(jr.normal(key, (3,))), jnp.ones(3)
        ),
        "Affine": lambda key: bi.Affine(jr.normal(key, (2,)), jnp.ones(2)),
        "Chain": lambda key: bi.Chain([bi.Affine(jr.normal(key, (2,))), bi.Tanh((2,))]),
        "Permute": lambda key: bi.Permute(jnp.array([1, 0])),
    }


@_library
def _numpyro() -> dict[str, Factory]:
    import numpyro
    import numpyro.distributions as di
    from numpyro.infer import autoguide, MCMC, NUTS, SVI, Trace_ELBO

    some = lambda key: jr.normal(key, (3,))
    more = lambda key: jnp.exp(jr.normal(jr.fold_in(key, 1), (3,)))
    tril = lambda key: jnp.tril(jr.normal(key, (3, 3)), -1) + jnp.eye(3)

    def model(x: Any = None) -> None:
        numpyro.sample("x", di.Normal(numpyro.sample("m", di.Normal(0.0, 1.0)), 1.0))

    def svi(key: jax.Array) -> Any:
        guide = autoguide.AutoNormal(model)
        return SVI(model, guide, numpyro.optim.Adam(1e-2), Trace_ELBO()).init(key)

    def nuts(key: jax.Array) -> Any:
        mcmc = MCMC(NUTS(model), num_warmup=2, num_samples=2, progress_bar=False)
        mcmc.run(key)
        return mcmc.last_state

    return {
        "Normal": lambda key: di.Normal(some(key), more(key)),
        "Beta": lambda key: di.Beta(more(key), more(key) + 1),
        "Gamma": lambda key: di.Gamma(more(key), more(key) + 1),
        "StudentT": lambda key: di.StudentT(more(key), some(key), more(key) + 1),
        "Uniform": lambda key: di.Uniform(some(key), some(key) + 1),
        "Categorical": lambda key: di.Categorical(logits=some(key)),
        "MultivariateNormal": lambda key: di.MultivariateNormal(
            some(key), scale_tril=tril(key)
        ),
        "TruncatedNormal": lambda key: di.TruncatedNormal(some(key), more(key), low=0),
        "Independent": lambda key: di.Normal(some(key), more(key)).to_event(1),
        "expanded": lambda key: di.Normal(some(key), more(key)).expand((2, 3)),
        "LogNormal": lambda key: di.LogNormal(some(key), more(key)),
        "mixture": lambda key: di.MixtureSameFamily(
            di.Categorical(logits=some(key)), di.Normal(some(key), more(key))
        ),
        "masked": lambda key: di.Normal(some(key), more(key)).mask(True),
        "state of SVI": svi,
        "state of NUTS": nuts,
    }


@_library
def _distrax() -> dict[str, Factory]:
    import distrax as di

    some = lambda key: jr.normal(key, (3,))
    more = lambda key: jnp.exp(jr.normal(jr.fold_in(key, 1), (3,)))
    return {
        "Normal": lambda key: di.Normal(some(key), more(key)),
        "Categorical": lambda key: di.Categorical(logits=some(key)),
        "MultivariateNormalDiag": lambda key: di.MultivariateNormalDiag(
            some(key), more(key)
        ),
        "Transformed": lambda key: di.Transformed(
            di.Normal(some(key), more(key)), di.ScalarAffine(some(key), more(key))
        ),
        "Chain": lambda key: di.Chain([di.Tanh(), di.ScalarAffine(some(key))]),
        "Lambda": lambda key: di.Lambda(jnp.exp),
        "spline": lambda key: di.RationalQuadraticSpline(
            jr.normal(key, (13,)), -1.0, 1.0
        ),
    }


@_library
def _qwix() -> dict[str, Factory]:
    import qwix
    from flax import linen

    def quantise(qtype: Any, **options: Any) -> Factory:
        return lambda key: qwix.quantize(jr.normal(key, (4, 4)), qtype, **options)

    def trained(key: jax.Array) -> Any:
        rules = [qwix.QuantizationRule(weight_qtype="int8")]
        model = qwix.quantize_model(linen.Dense(4), qwix.PtqProvider(rules))
        return model.init(key, jnp.ones((2, 4)))

    return {
        "int8": quantise(jnp.int8),
        "int4 by channel": quantise(jnp.int4, channelwise_axes=[0]),
        "float8": quantise(jnp.float8_e4m3fn),
        "rules": lambda key: (
            qwix.QuantizationRule(weight_qtype="int8"),
            jr.normal(key),
        ),
        "post-training": trained,
    }

"""What a run leaves when it is complete: the model folder and the curve."""

from pathlib import Path
from typing import Any

from lcjax.models import ModelConfig
from lcjax.models.lora import is_adapter
from lcjax.parallel import distributed
from lcjax.training import folder as folder_lib
from lcjax.training.config import TrainConfig
from lcjax.training.progress import announce
from lcjax.training.track import plot_loss, read
from lcjax.tree import flatten, union


def finish(
    config: TrainConfig, folder: Path, model: ModelConfig, trained: dict, frozen: dict, tokenizer
) -> dict[str, Any]:
    """Writes the results, says where everything is, returns the last metrics."""
    rows = read(folder / folder_lib.METRICS)
    if config.train.export:
        export(config, folder, model, trained, frozen, tokenizer)
    if distributed.first():
        plot_loss(folder / folder_lib.METRICS, folder / folder_lib.CURVE)
        written = ", model/ (a Hugging Face folder)"
        found = f"{folder_lib.METRICS}, loss.png, checkpoints/"
        print(f"results in {folder}: {found}{written if config.train.export else ''}")
    return {key: value for row in rows for key, value in row.items()}


def export(
    config: TrainConfig, folder: Path, model: ModelConfig, trained: dict, frozen: dict, tokenizer
) -> None:
    """The merged model; beside it the adapters alone, when nothing else was trained.

    Adapters are merged one layer at a time while it is written: no second model in memory. All
    processes give their parts of the weights, the first one writes.
    """
    from lcjax.checkpoints import save_hf
    from lcjax.checkpoints.peft import save_peft

    announce(f"writing {folder / folder_lib.MODEL}")
    if all(map(is_adapter, flatten(trained))):
        base = config.model.path or str(config.model.preset)
        save_peft(folder / folder_lib.ADAPTER, trained, model, base=base, overwrite=True)
    params, dtype = union(trained, frozen), config.train.export_dtype
    where = folder / folder_lib.MODEL
    save_hf(where, params, model, tokenizer, dtype=dtype, overwrite=True)

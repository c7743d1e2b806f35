"""From a model folder to its renderer; works offline and asks nobody."""

from pathlib import Path

from stoker.errors import ConfigInvalid
from stoker.inference.tokens.base import History, Renderer


def open_renderer(folder: Path, *, history: History = "append") -> Renderer:
    """Return the renderer of the model in ``folder`` (Hugging Face's layout; weights not needed).

    Takes a second or two, once a process: the package ``renderers`` is slow to import.

    Raises:
        ConfigInvalid: the extra ``tokens`` is not installed, or the folder holds no tokenizer or
            chat template that can be used.
    """
    try:
        from stoker.inference.tokens.folder import load_folder  # noqa: PLC0415 - an extra
        from stoker.inference.tokens.packaged import fitting  # noqa: PLC0415 - an extra
        from stoker.inference.tokens.renderer import FolderRenderer  # noqa: PLC0415 - an extra
        from stoker.inference.tokens.template import ChatTemplate  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigInvalid(
            f"prompts for a model folder need packages that are not installed ({error}); "
            "nothing was started: pip install 'stoker[tokens]'"
        ) from error
    tokenizer, files = load_folder(folder)
    template = ChatTemplate(files.templates, files.specials)
    return FolderRenderer(
        tokenizer,
        template,
        stop_ids=files.stop_ids,
        packaged=fitting(tokenizer, template, files.names),
        history=history,
    )

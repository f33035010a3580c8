"""Saves figures in the style of our plots, the same bytes for the same numbers."""

from pathlib import Path

from matplotlib.figure import Figure


def save_figure(figure: Figure, note: str, folder: Path, name: str) -> list[Path]:
    """Write a figure with a note below as SVG and PNG into a folder; return the files.

    Call it where `rc_context(STYLE)` holds, with the style of `shoal.cli.finetuning.loss_plot`.
    """
    figure.supxlabel(note, fontsize=7, color="0.4")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.svg", folder / f"{name}.png"]
    # No date and no version of the program: the same numbers are the same file.
    figure.savefig(files[0], metadata={"Date": None, "Creator": None})
    figure.savefig(files[1], dpi=160, metadata={"Software": None})
    return files

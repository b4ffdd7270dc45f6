"""RULER (Hsieh et al. 2024, arXiv 2404.06654): thirteen generated tasks over one length."""

from lcjax.evaluation.tasks.ruler.ruler import Ruler

__all__ = ["Ruler"]

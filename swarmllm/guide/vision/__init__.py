"""The projector of the guide: pictures that a script draws, questions about them, and the training of what
reads them.

`scenes`, `drawing`, `captions` and `questions` need Pillow only; `tower`, `frozen`, `words`, `export` and
`train` need PyTorch.
"""

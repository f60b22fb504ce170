"""Every private or unstable name of PyTorch, Triton, torchao, transformers and diffusers, by library.

``names.py`` lists them: what each is for, with which versions it works, and what happens when it is gone.
"""

"""What reading a base model can go wrong with."""


class ModelError(Exception):
    """The base model cannot be served; the message names the file and what to change.

    The one error that opening a model folder, a GGUF file or its tokenizer raises, whatever the
    files hold.
    """

"""The OpenAI API. `handlers` is all that the app needs of it."""

from gateway.inference import chat, completions, models

handlers = [
    chat.create_chat_completion,
    completions.create_completion,
    models.list_models,
    models.retrieve_model,
]

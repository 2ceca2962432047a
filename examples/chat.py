"""Stream one answer through the OpenAI SDK: python examples/chat.py MODEL [QUESTION …]

OPENAI_BASE_URL and OPENAI_API_KEY say where and who; `make demo` prints them.
"""

import sys

from openai import OpenAI

model, *words = sys.argv[1:]
stream = OpenAI().chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": " ".join(words) or "What is the capital of France?"}],
    temperature=0,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

"""The worker that answers as it is told, models with tools and with reasoning, and keys."""

from tests.producers.gateway.openai.conftest import answering as answering
from tests.producers.gateway.openai.test_chat_tools import calls as calls
from tests.producers.gateway.openai.test_reasoning import thinker as thinker
from tests.producers.gateway.test_keys import make as make

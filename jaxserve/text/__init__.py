"""Text in, tokens out, and back: tokenizers, chat templates, incremental decoding and stop strings."""

from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.checkpoint_files import load_tokenizer
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stop_strings import StopStrings
from jaxserve.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer", "load_tokenizer"]

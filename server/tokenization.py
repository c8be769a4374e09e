"""POST /tokenize and /detokenize, in vLLM's shapes."""

from typing import Annotated

from fastapi import APIRouter, Depends

from server.answers import Detokenized, Tokens
from server.body import JsonRoute
from server.errors import documented
from server.prompts import chat_tokens, text_tokens, tokens_text
from server.schema import DetokenizeRequest, TokenizeChat, TokenizePrompt
from server.served import Served, served

router = APIRouter(route_class=JsonRoute, responses=documented(400, 401, 404, 413, 415, 500, 503))


@router.post("/tokenize")
async def tokenize(body: TokenizePrompt | TokenizeChat, served: Annotated[Served, Depends(served)]) -> Tokens:
    """The token ids of a text, or of a conversation in the model's chat template."""
    served.named(body.model)
    served.check_loaded()
    if isinstance(body, TokenizePrompt):
        ids = await text_tokens(served, body.prompt, body.add_special_tokens is not False)
    else:
        ids, _ = await chat_tokens(served, body)
    tokenizer = served.engine.tokenizer
    names = [tokenizer.id_to_token(token) for token in ids] if body.return_token_strs else None
    return Tokens(count=len(ids), max_model_len=served.max_model_len, tokens=ids, token_strs=names)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, served: Annotated[Served, Depends(served)]) -> Detokenized:
    """The text of token ids, special tokens included."""
    served.named(body.model)
    served.check_loaded()
    return Detokenized(prompt=await tokens_text(served, body.tokens, skip_special_tokens=False))

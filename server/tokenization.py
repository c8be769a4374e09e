"""POST /tokenize and /detokenize, and GET /tokenizer_info, in vLLM's shapes."""

from typing import Annotated

from fastapi import APIRouter, Depends

from server.answers import Detokenized, TokenizerInfo, Tokens
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


@router.get("/tokenizer_info")
async def tokenizer_info(served: Annotated[Served, Depends(served)]) -> TokenizerInfo:
    """Special tokens and chat template, for clients that have no tokenizer of their own (lm-eval)."""
    served.check_loaded()
    tokenizer = served.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_ids
    template = tokenizer.chat_template
    return TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=None if bos is None else tokenizer.id_to_token(bos),
        eos_token=tokenizer.id_to_token(eos[0]) if eos else None,
        chat_template=template.templates.get("default") if template else None,
        model_max_length=served.max_model_len,
    )

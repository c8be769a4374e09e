"""POST /tokenize and /detokenize, and GET /tokenizer_info, in vLLM's shapes."""

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from server.answers import Detokenized, TokenizerInfo, Tokens
from server.body import JsonRoute
from server.errors import documented
from server.prompts import chat_tokens, off_loop, tokens_text
from server.schema import DetokenizeRequest, TokenizeChat, TokenizePrompt
from server.served import Served, served

router = APIRouter(route_class=JsonRoute, responses=documented(400, 401, 404, 413, 415, 500, 503))


@router.post("/tokenize", response_model=Tokens)
async def tokenize(
    body: TokenizePrompt | TokenizeChat, served: Annotated[Served, Depends(served)]
) -> Response:
    """The token ids of a text, or of a conversation in the model's chat template."""
    served.named(body.model)
    served.check_loaded()
    if isinstance(body, TokenizePrompt):
        special = body.add_special_tokens is not False
        size, encode = len(body.prompt), served.engine.tokenizer.encode
        ids = await off_loop(size, encode, body.prompt, add_special_tokens=special)
    else:
        ids, _ = await chat_tokens(served, body)
    return await off_loop(len(ids), _answer, served, ids, bool(body.return_token_strs))


def _answer(served: Served, ids: list[int], names: bool) -> Response:
    spelled = [served.engine.tokenizer.id_to_token(token) for token in ids] if names else None
    answer = Tokens(count=len(ids), max_model_len=served.max_model_len, tokens=ids, token_strs=spelled)
    return Response(answer.model_dump_json(), media_type="application/json")


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

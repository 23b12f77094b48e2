"""Attention masks for packed documents.

Shape suffixes: B batch, S sequence; L query position, M key position (both S long).
"""

import torch


def document_mask(positions_BS: torch.Tensor, *, by_document: bool = True) -> torch.Tensor:
    """Causal mask, kept within each document of a packed sequence.

    positions_BS   integer position of each token in its own document: 0 begins a document
    by_document    False gives the plain causal mask, in which documents see each other
    Returns a boolean mask `[B, 1, L, M]`, True where query L may see key M: the meaning of
    FlexAttention's `and_masks(causal, document)` in torchtitan, written out.
    """
    positions_L = torch.arange(positions_BS.shape[1], device=positions_BS.device)
    causal_LM = positions_L[:, None] >= positions_L[None, :]
    if not by_document:
        return causal_LM.expand(positions_BS.shape[0], 1, -1, -1)
    document_BS = (positions_BS == 0).cumsum(dim=1)
    same_BLM = document_BS[:, :, None] == document_BS[:, None, :]
    return (causal_LM & same_BLM)[:, None]

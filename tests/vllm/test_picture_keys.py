"""Pictures in a prompt are part of the keys: tokens alone do not tell what was computed."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tierstore import Manifest
from tierstore.key import OffloadKey
from tierstore.planner.groups import build_group_configs

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 16
PICTURE_AT = 20


def keys_of(picture: str) -> list[OffloadKey]:
    init_none_hash(sha256)
    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=picture,
        mm_position=PlaceholderRange(offset=PICTURE_AT, length=8),
    )
    request = Request(
        request_id="r",
        prompt_token_ids=[5] * 64,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[feature],
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )
    manifest = Manifest.simple("m", 4096)
    (config, *_) = build_group_configs(manifest.group_specs(), manifest.namespace, 1)
    return config.keys(request.block_hashes, 0, 4)


def test_another_picture_under_the_same_tokens_has_other_keys_from_its_first_block_on() -> None:
    cat, dog = keys_of("cat"), keys_of("dog")
    assert cat == keys_of("cat")
    same = [ours == theirs for ours, theirs in zip(cat, dog, strict=True)]
    assert same == [True, False, False, False]

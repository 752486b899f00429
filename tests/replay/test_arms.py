import ast
from pathlib import Path

import pytest
from tim_trace.replay import arms
from tim_trace.replay.arm_option import ENGINES, FACTORY, GRADIENT, LOCATE
from tim_trace.replay.arms import OPTIONS, Arm, parse_arm
from tim_trace.replay.backends.kernels import KERNELS
from tim_trace.schemas.errors import InvalidOption
from tim_trace.schemas.steps import parse_steps


@pytest.mark.parametrize(
    ("text", "changes", "name"),
    [
        ("dtype=fp16", {"dtype": "fp16"}, "fp16"),
        ("dtype=fp16,batch-size=1", {"dtype": "fp16", "batch_size": 1}, "fp16+batch-size-1"),
        ("mode=chunked:4, deterministic", {"mode": "chunked:4", "deterministic": True}, "chunked-4+deterministic"),
        ("top-p=0.9,name=nucleus", {"top_p": 0.9}, "nucleus"),
        ("lm-head=fp32", {"lm_head": "fp32"}, "head-fp32"),
        ("", {}, "as-recorded"),
    ],
)
def test_an_arm_is_read_and_named_for_what_it_changes(text, changes, name):
    arm = parse_arm(text)
    assert (arm.changes, arm.name) == (changes, name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dtype=fp8", "dtype: got 'fp8'; use fp64"),
        ("speed=9", "write comma-separated name=value changes"),
        ("batch-size", "write comma-separated name=value changes"),
        ("batch-size=two", "batch-size cannot be 'two'"),
        ("batch-size=0", "pass 1 or more"),
        ("mode=chunked:0", "use prefill, decode, chunked:N"),
        ("temperature=0", "pass a number above 0"),
        ("top-p=1.5", "above 0 and up to 1"),
        (
            "engine=vllm,preempt=2",
            "preempt: 2 cannot be combined with mode prefill: only decoding generates several tokens",
        ),
        ("kv-dtype=fp8", "a prefill does not read the cache; use mode='decode', chunked:N"),
        ("padding=packed,mode=decode", "packed cannot be combined with mode decode: .*; use mode='prefill'"),
        ("compile,mode=decode", "compile: cannot be combined with mode decode: .*; use mode='prefill'"),
        ("padding=packed,attention=eager", "cannot separate packed rows; use attention='math', flash"),
        ("prefix-caching=on", "works only with vLLM; add engine='vllm'"),
        ("engine=vllm,dtype=fp64", "dtype: vLLM does not support fp64; use fp32, bf16, fp16"),
        ("weights-version=-1", "weights_version: got -1; pass 0 or more"),
        ("engine=vllm,threads=2", "threads: vLLM does not support this option; .*mode.*attention-backend"),
    ],
)
def test_an_arm_that_makes_no_sense_is_refused(text, message):
    with pytest.raises(InvalidOption, match=message):
        parse_arm(text)


def test_every_option_of_an_arm_is_read_by_what_scores():
    """An option that is described and that no code reads would change nothing, silently."""
    read = set()
    for file in Path(arms.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in ("arm", "forward"):
                read.add(node.attr)
    assert set(OPTIONS) - read == set()


def test_an_option_s_description_names_what_there_is():
    for name, described in OPTIONS.items():
        assert described.help.endswith((".", "]")), name
        assert set(described.users) & set(ENGINES), name
        assert set(described.users) <= {*ENGINES, FACTORY, GRADIENT, LOCATE}, name
        assert set(described.refused) <= set(described.users), name
        for clash in described.clashes:
            words = {value.partition(":")[0] for value in OPTIONS[clash.other].values}
            assert set(clash.values) <= set(described.values), name
            assert set(clash.others) <= words, name
            assert clash.engine in (None, *described.users), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_attention_kernel_is_known_to_torch_or_transformers(kernel):
    torch = pytest.importorskip("torch")
    from transformers import AttentionInterface

    described = KERNELS[kernel]
    assert described.implementation in ("eager", *AttentionInterface())
    if described.backend is not None:
        assert hasattr(torch.nn.attention.SDPBackend, described.backend)
    assert parse_arm(f"attention={kernel}").name == kernel


def test_an_arm_names_the_options_that_its_engine_ignores():
    assert Arm(mode="decode").unheard == ["mode"]
    assert Arm(engine="vllm", mode="decode", prefix_caching="off").unheard == []
    assert Arm(engine="vllm", prefix_caching="on").unheard == ["prefix_caching"]


@pytest.mark.parametrize("arm", ["weights-version=3", "temperature=0.9,top-k=5", "quantize=int8", "adapter=off"])
def test_an_arm_that_changes_no_operator_is_nothing_for_locate(arm):
    assert not parse_arm(arm).is_heard
    assert parse_arm(f"{arm},attention=math").is_heard


def test_cached_tokens_follow_from_the_mode():
    assert [Arm(mode=mode).cached_tokens for mode in ("prefill", "decode", "chunked:7")] == [None, 1, 7]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("3", [3]),
        ("2:4", [2, 3, 4]),
        ("2:8:3", [2, 5]),
        ("all", [1, 2, 3, 4, 5, 9]),
        (":2,9", [1, 2, 9]),
        ("5:", [5, 9]),
    ],
)
def test_steps_are_read(text, steps):
    assert parse_steps(text, [1, 2, 3, 4, 5, 9]) == steps


@pytest.mark.parametrize("text", ["", "six", "7", "1:2:3:4"])
def test_steps_that_name_nothing_are_refused(text):
    with pytest.raises(InvalidOption, match="steps"):
        parse_steps(text, [1, 2, 3, 4, 5, 9])


@pytest.mark.parametrize(
    "given", [{"engine": "vllm", "prefix_caching": True}, {"dtype": 16}, {"quantize": 8}, {"mode": "chunked:08"}]
)
def test_a_value_of_another_type_or_spelling_is_refused(given):
    with pytest.raises(InvalidOption, match="use "):
        Arm(**given)

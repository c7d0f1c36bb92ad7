"""What looks like a secret is shown nowhere, and nothing else is hidden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from podium.config import config_to_yaml, keys_of, load_config
from podium.errors import ConfigError, PodiumError
from podium.runs.config import GRPOConfig, InferenceConfig, PPOConfig, SFTConfig
from podium.secrecy import (
    MASK,
    find_masked,
    find_secrets,
    has_secrets,
    is_secret,
    mask,
    mask_command,
    mask_text,
    variable_of,
)

SECRET = "correct-horse-battery-7"
SIGNED = {
    "hub": "hf_" + "aB3" * 9,
    "openai": "sk-proj-" + "aB3_" * 6,
    "github": "ghp_" + "aB3" * 9,
    "github, fine": "github_pat_" + "aB3_" * 6,
    "gitlab": "glpat-" + "aB3" * 7,
    "wandb": "wandb_v1_" + "aB3" * 7,
    "slack": "xoxb-1234567890-abcdef",
    "aws": "AKIA" + "A1B2C3D4" * 2,
    "google": "AIza" + "aB3_-" * 7,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "a URL": "postgres://user:hunter2@db.example/x",
    "a URL without a user": "redis://:hunter2@cache:6379",
    "a header": "Bearer abcdefghijkl.mnop",
    "groq": "gsk_" + "aB3" * 9,
    "nvidia": "nvapi-" + "aB3_" * 9,
    "replicate": "r8_" + "aB3" * 9,
    "sendgrid": "SG." + "aB3" * 7 + "." + "aB3" * 9,
    "a hook": "https://hooks.slack.com/services/T0/B0/XXXX",
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has seen no secret yet. One that has been seen is hidden wherever it stands."""
    monkeypatch.setattr("podium.secrecy._known", set[str]())


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "apiKey",
        "X-API-Key",
        "HF_TOKEN",
        "openai_api_key",
        "password",
        "db_passwd",
        "webhook",
        "webhook_url",
        "Authorization",
        "NETRC",
        "github_pat",
        "client_secret",
        "access_key",
        "token",
        "cookie",
        "api_keys",
        "auth",
    ],
)
def test_a_key_that_names_a_secret_hides_its_text_however_deep(key: str) -> None:
    values = {"environment": {"options": {"judges": [{"how": {key: SECRET}}]}, "other": {key: [SECRET, SECRET]}}}
    masked = mask(values)
    assert SECRET not in json.dumps(masked)
    assert masked["environment"]["options"]["judges"][0]["how"] == {key: MASK}
    assert mask({key: 3, f"{key}_file": "a"}) == {key: 3, f"{key}_file": "a"}


DRAWN = "Zq7vK2mP9xL4wR8t"


@pytest.mark.parametrize(
    "key",
    [
        "openai_key", "openaiKey", "judge_key", "hf_keys", "api_tokens", "tokens", "myAPIToken", "key", "deploy_key",
        "access_key_id", "signature", "sas", "auth_header", "passcode", "jwt", "otp",
    ],
)  # fmt: skip
def test_a_key_that_may_name_a_secret_hides_what_a_program_has_drawn(key: str) -> None:
    assert DRAWN not in json.dumps(mask({"options": {key: DRAWN, "more": [{key: [DRAWN]}]}}))
    plain = {key: "step-000012-of-200"} if key not in ("passcode", "jwt") else {}
    assert mask({**plain, "name": DRAWN, f"{key}_column": DRAWN}) == {**plain, "name": DRAWN, f"{key}_column": DRAWN}


@pytest.mark.parametrize(
    "values",
    [
        {"credentials": {"user": "u", "value": DRAWN}},
        {"auth": ["user", DRAWN]},
        {"args": ["--api-key", DRAWN]},
        {"args": [f"--api-key={DRAWN}", "-v"]},
        {"env": [f"JUDGE_TOKEN={DRAWN}"]},
        {"command": f"curl -H 'X-Api-Key: {DRAWN}' host"},
        {"connection": f"Server=x;AccountKey={DRAWN};Port=1"},
        {"url": f"https://host/x?api_key={DRAWN}&n=2"},
        {"url": f"https://host/x?v=1&sig={DRAWN}"},
        {"remote": f"https://{DRAWN}@host/me/x.git"},
        {"cache": f"redis://:a@{DRAWN}@host:6379"},
        {"file": json.dumps({"private_key": DRAWN})},
        {f"https://me:{DRAWN}@host/train.jsonl": 0.5, "other.jsonl": 0.5},
    ],
    ids=str,
)
def test_a_secret_is_hidden_wherever_its_name_stands(values: dict[str, Any]) -> None:
    masked = mask({"options": values})
    assert DRAWN not in json.dumps(masked) and MASK in json.dumps(masked)
    assert [*find_masked(masked)], "a resume asks for it"
    text = json.dumps(values) if "credentials" not in values and "auth" not in values else f"got {DRAWN}"
    assert DRAWN not in mask_text(text)


def test_a_password_of_digits_is_hidden() -> None:
    assert mask({"password": 31415926, "other": {"db_password": 2718}}) == {
        "password": MASK,
        "other": {"db_password": MASK},
    }
    assert mask({"max_tokens": 4096, "secret": True, "eos_token": 151643}) == {
        "max_tokens": 4096,
        "secret": True,
        "eos_token": 151643,
    }


@pytest.mark.parametrize(
    "text",
    [
        "missing key: model.layers.10.mlp.experts.3.down_proj.w1.weight",
        "key=step-000012, token: <|im_end|>, auth = none, signature: (completion, row)",
        "https://a1b2c3d4e5f6.cloudfront.net/x/y.jsonl",
        "the checkpoint has sha256 0123456789abcdef0123456789abcdef01234567",
        "no token 123456789012 and no tokens 151643, 151644",
        "token runs/2026-11-27-043347-grpo of Qwen/Qwen3-0.6B-Instruct-2507",
    ],
)
def test_a_name_before_a_plain_word_hides_nothing(text: str) -> None:
    assert mask_text(text) == text


@pytest.mark.parametrize("text", SIGNED.values(), ids=SIGNED)
def test_a_text_that_looks_like_a_secret_is_hidden_under_any_key(text: str) -> None:
    assert MASK in mask({"note": f"use {text} here"})["note"]
    assert "use " in mask_text(f"use {text} here") and text not in mask_text(f"use {text} here")


def test_the_rest_of_a_url_stays() -> None:
    assert mask_text("at postgres://user:hunter2@db.example/x") == f"at postgres://user:{MASK}@db.example/x"


def test_what_is_no_secret_stays() -> None:
    plain = {
        "stop_token": "<|end|>", "eos_token": "</s>", "tokenizer": "chars:0123", "max_tokens": 5,
        "key": "a", "key_column": "b",
        "answer_key": "c", "revision": "0123456789abcdef0123456789abcdef01234567", "url": "https://user@host/x:y@z",
        "email": "a@b.c", "path": "/data/a:b@c", "api_key": "", "monkey": "d", "note": "sk-learn and hf_hub",
    }  # fmt: skip
    assert mask(plain) == plain
    assert not [
        key.path
        for cls in (PPOConfig, GRPOConfig, SFTConfig, InferenceConfig)
        for key in keys_of(cls)
        if is_secret(key.path, "text")
    ], "no key of Podium's own"


def test_variables_are_secrets_by_name_or_value(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {
        "MY_PAT": "1",
        "SLACK_WEBHOOK": "1",
        "NETRC": "1",
        "SENTRY_DSN": "1",
        "WANDB_API_KEY": "1",
        "X_WEBHOOK_URL": "1",
    }
    hidden |= {"SSHPASS": "1", "PASS": "1", "AZURE_STORAGE_CONNECTION_STRING": "1", "MY_BEARER": "1", "LOGIN_JWT": "1"}
    hidden |= {"STORE": f"AccountName=a;AccountKey={DRAWN}"}
    hidden |= {"DATABASE_URL": SIGNED["a URL"], "NOTE": SIGNED["github"], "PODIUM_TOKEN": "1", "AWS_PROFILE": "1"}
    plain = {
        "PATH_": "1",
        "HOME_URL": "https://host/x",
        "COMPAT": "1",
        "COMPASS": "1",
        "PATTERN": "1",
        "MY_KEYBOARD": "1",
    }
    for name, value in {**hidden, **plain}.items():
        monkeypatch.setenv(name, value)
    assert {*find_secrets()} >= {*hidden}
    assert not {*find_secrets()} & {*plain}
    assert "MY_PAT" not in find_secrets(["MY_PAT"])


def test_a_value_that_plainly_is_none_is_no_secret_whatever_its_name() -> None:
    plain = {
        "REWARD_MAX_TOKENS": "4096", "MAX_TOKENS": "131072", "MAX_TOKENS_PER_CALL": "0", "TOKEN_LIMIT": "1.5",
        "AUTH_TIMEOUT": "30", "USE_AUTH": "true", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "False", "ADD_EOS_TOKEN": "no",
        "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "ap-southeast-2", "AWS_MAX_ATTEMPTS": "3",
        "AWS_EC2_METADATA_DISABLED": "true", "KEY_LENGTH": "2048",
    }  # fmt: skip
    secret = {
        "MAX_TOKENS": DRAWN, "TOKEN_LIMIT": "31415926535", "PIN_TOKEN": "4821", "MFA_TOKEN": "000123", "API_KEY": "7",
        "MAX_API_KEY": "1234567", "MAX_TOKEN": "4096", "ACCESS_TOKENS": "4096", "MAX_PASSWORD": "31415", "PASS": "on",
        "DB_PASSWORD": "true", "USE_PASSWORD_LIMIT": "3", "LOGIN_SECRET": "yes", "MY_PAT": "off", "AWS_PROFILE": "prod",
        "AWS_REGION": "AKIA" + "A1B2C3D4" * 2, "AWS_ACCESS_KEY_ID": "1", "AWS_SECRET_REGION": "us-east-1",
        "MIN_TOKENS": " 1", "NUM_TOKENS": "\uff11", "TOKEN": "correct-horse-battery-7", "COOKIE_SIZE": "1",
    }  # fmt: skip
    assert find_secrets(env=plain) == []
    assert find_secrets(env=secret) == [*secret]


@pytest.mark.parametrize(
    "words",
    [
        ["--environment.options.api_key", SECRET],
        [f"--environment.options.api_key={SECRET}"],
        ["--environment.options", f"{{api_key: {SECRET}, n: 2}}"],
        ["--environment.options", json.dumps({"judge": {"api_key": SECRET}})],
        [f"--environment.options={{judges: [{{n: 1, api_key: {SECRET}}}]}}"],
        ["--environment.options", f"{{judge: {{api_keys: [short, {SECRET}]}}}}"],
        ["--environment.options", f"[--api-key, {SECRET}]"],
        ["--environment.options", f'{{judge: {{"api_key": "{SECRET}"'],  # no YAML
        ["--environment.options", f"{{judge: {{n: [1, api_keys: [{SECRET}, 2"],
        ["--environment.options", f"{{n: !!int '', api_key: {SECRET}}}"],
        ["--run.name", SIGNED["hub"]],
    ],
)
def test_a_command_line_is_written_without_its_secrets(words: list[str]) -> None:
    masked = mask_command(["podium", "train", "grpo", *words, "--optim.lr", "1e-4"])
    assert SECRET not in " ".join(masked) and SIGNED["hub"] not in " ".join(masked)
    assert masked[:3] == ["podium", "train", "grpo"] and masked[-2:] == ["--optim.lr", "1e-4"]


def test_a_configuration_is_written_without_secrets_and_asks_for_them_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: Any = {
        "name": "path.py:play",
        "options": {"api_key": SECRET, "keys": {"tokens": [1], "api_keys": ["a", SECRET]}},
    }
    base = ["--model.path", "m", "--data.train", "d", "--sampling.max_new_tokens", "3", "--batch.prompts", "4"]
    config = load_config(GRPOConfig, None, [*base, "--environment", json.dumps(values)])
    assert config.environment.options["api_key"] == SECRET
    file = tmp_path / "config.yaml"
    file.write_text(config_to_yaml(config))
    assert SECRET not in file.read_text()
    variable = "PODIUM_SECRET_ENVIRONMENT_OPTIONS_API_KEY"
    with pytest.raises(ConfigError, match=rf"environment\.options\.api_key is a secret.*{variable}.*--environment"):
        load_config(GRPOConfig, file)
    monkeypatch.setenv(variable, SECRET)
    monkeypatch.setenv(variable_of("environment.options.keys.api_keys"), '["a", "b"]')
    again = load_config(GRPOConfig, file).environment.options
    assert (again["api_key"], again["keys"]["api_keys"]) == (SECRET, ["a", "b"])
    monkeypatch.delenv(variable)
    given = load_config(GRPOConfig, file, ["--environment.options.api_key", "another"])
    assert given.environment.options["api_key"] == "another"
    assert not list(find_masked(given.environment.options))


@pytest.mark.parametrize(
    "typed",
    [
        ["--environment.options", f"[{SECRET}, api_key"],
        ["--environment.api_key", SECRET],
        ["--environment.options.api_key", SECRET, "--environment.options.api_key.x", "1"],
        ["--engine", f"{{api_key: {SECRET}}}"],
        ["--optim.lr", SIGNED["hub"]],
    ],
)
def test_errors_that_repeat_a_setting_hide_it(typed: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(GRPOConfig, None, ["--model.path", "m", *typed])
    if "[" not in typed[1]:  # what is no YAML has no keys
        assert SECRET not in str(raised.value)
    assert SIGNED["hub"] not in str(raised.value)


def test_an_error_of_yaml_quotes_no_part_of_a_secret(tmp_path: Path) -> None:
    text = f"{{judge: {{api_key: {SECRET}}}"
    with pytest.raises(ConfigError, match=r"line 1, column 43$") as raised:
        load_config(GRPOConfig, None, ["--model.path", "m", "--environment.options", text])
    assert not any(part in str(raised.value) for part in SECRET.split("-")[:3])
    (tmp_path / "run.yaml").write_text(f"environment:\n  options:\n    judge:\n      password: {SECRET} [\n  n: {{1\n")
    with pytest.raises(ConfigError, match="line 6") as raised:
        load_config(GRPOConfig, tmp_path / "run.yaml", [])
    assert not any(part in str(raised.value) for part in SECRET.split("-")[:3])
    (tmp_path / "run.yaml").write_text("optim:\n  lr: {1\n")
    with pytest.raises(ConfigError, match=r"lr: \{1"):
        load_config(GRPOConfig, tmp_path / "run.yaml", [])


@pytest.mark.parametrize("value", ["!!int ''", "!!timestamp x", "!!bool x"])
def test_what_yaml_fails_to_read_is_an_error_of_the_option(value: str) -> None:
    """PyYAML raises IndexError, AttributeError and KeyError for these."""
    with pytest.raises(ConfigError, match=r"--environment.options '\{a: !!.* is not valid YAML: "):
        load_config(GRPOConfig, None, ["--model.path", "m", "--environment.options", f"{{a: {value}}}"])


def test_an_error_of_podium_hides_what_is_known_and_what_the_environment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    mask({"api_key": SECRET})
    monkeypatch.setenv("MY_API_KEY", "another-long-secret")
    assert str(PodiumError(f"{SECRET} and another-long-secret were refused")) == f"{MASK} and {MASK} were refused"


@pytest.mark.timeout(60)  # seconds of searches that look from each place to the end take hours
@pytest.mark.parametrize("part", ["x", "ab.", "a-", "eyJabc-", "eyJabcdefghijk.", "x://", "x://a:", "Bearer ", "sk-"])
def test_a_long_text_is_searched_once(part: str) -> None:
    assert mask_text(part * (500_000 // len(part)) + " https://me:password@host").endswith("https://me:<secret>@host")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["x", "a-", "k: ", "'", '"k": "'])
def test_a_long_text_that_is_no_yaml_is_searched_once(part: str) -> None:
    assert not has_secrets(part * (500_000 // len(part)))

"""What a record of Every Eval Ever 0.3.0 must have, and what a JSON schema asks, for tests of exports.

`SCHEMA` states the entries that our export uses; `validate` knows the keywords that it needs. If the package
`every_eval_ever` is installed, tests read the schema that comes with it as well.
"""

import re

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
TEXT, NUMBER = {"type": "string"}, {"type": "number"}
BOUND = {"oneOf": [NUMBER, {"enum": ["Infinity", "-Infinity"]}, {"type": "null"}]}


def _object(needed, more=None, closed=False):
    found = {"type": "object", "required": [*needed], "properties": {**needed, **(more or {})}}
    return found | ({"additionalProperties": False} if closed else {})


SOURCES = [
    _object({"dataset_name": TEXT, "source_type": {"const": "url"}, "url": {"type": "array", "items": TEXT}}),
    _object(
        {"dataset_name": TEXT, "source_type": {"const": "hf_dataset"}},
        {"hf_repo": TEXT, "hf_split": TEXT, "samples_number": {"type": "integer"}},
    ),
    _object({"dataset_name": TEXT, "source_type": {"const": "other"}}),
]
UNCERTAINTY = _object(
    {},
    {
        "standard_error": _object({"value": NUMBER}, {"method": TEXT}),
        "confidence_interval": _object({"lower": NUMBER, "upper": NUMBER}, {"confidence_level": NUMBER}),
        "num_samples": {"type": "integer"},
        "num_bootstrap_samples": {"type": "integer"},
    },
)
METRIC = _object(
    {"lower_is_better": {"type": "boolean"}, "min_score": BOUND, "max_score": BOUND},  # needed of continuous scores
    {
        **dict.fromkeys(("evaluation_description", "metric_id", "metric_name", "metric_kind", "metric_unit"), TEXT),
        "score_type": {"enum": ["binary", "continuous", "levels"]},
        "metric_parameters": {
            "type": "object",
            "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
        },
    },
)
DETAILS = {
    "type": "object",
    "required": ["deployment_type", "model_availability"],
    "properties": {
        "deployment_type": {"enum": ["self_deployed", "externally_managed", "unknown"]},
        "model_availability": {"enum": ["open_weights", "closed_weights", "unknown"]},
    },
    "additionalProperties": {"type": "string"},
}
SCHEMA = _object(
    {
        "schema_version": {"const": "0.3.0"},
        "evaluation_id": TEXT,
        "retrieved_timestamp": TEXT,
        "source_metadata": _object(
            {
                "source_type": {"enum": ["documentation", "evaluation_run"]},
                "source_organization_name": TEXT,
                "evaluator_relationship": {"enum": ["first_party", "third_party", "collaborative", "other"]},
            },
            {"source_name": TEXT},
        ),
        "model_info": _object({"name": TEXT, "id": TEXT, "additional_details": DETAILS}, {"developer": TEXT}),
        "eval_library": _object({"name": TEXT, "version": TEXT}, {"additional_details": TEXTS}),
        "evaluation_results": {
            "type": "array",
            "items": _object(
                {
                    "evaluation_name": TEXT,
                    "source_data": {"oneOf": SOURCES},
                    "metric_config": METRIC,
                    "score_details": _object({"score": NUMBER}, {"details": TEXTS, "uncertainty": UNCERTAINTY}),
                },
                {"evaluation_result_id": TEXT, "generation_config": _object({}, {"additional_details": TEXTS})},
            ),
        },
    },
    {"evaluation_timestamp": TEXT},
    closed=True,
)
FILE = re.compile(r"data/[^/]+/[^/]+/[^/]+/[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\.json")
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def validate(value, schema, root=None, place="record"):
    """Assert that a value follows a JSON schema (draft 7, without formats and patterns)."""
    root = schema if root is None else root
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return validate(value, target, root, place)
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        fits = any(isinstance(value, TYPES[name]) and (name == "boolean") >= isinstance(value, bool) for name in names)
        assert fits, f"{place} is {value!r}, not {names}"
    assert value in schema.get("enum", [value]), f"{place} is {value!r}"
    assert value == schema.get("const", value), f"{place} is {value!r}"
    if "oneOf" in schema:
        assert sum(_valid(value, part, root) for part in schema["oneOf"]) == 1, f"{place}: {value!r} fits not one"
    if "if" in schema:
        branch = "then" if _valid(value, schema["if"], root) else "else"
        validate(value, schema.get(branch, {}), root, place)
    if isinstance(value, dict):
        for key in schema.get("required", []):
            assert key in value, f"{place} has no {key}"
        for key, part in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            assert inner is not False, f"{place} has {key}"
            validate(part, {} if inner is True else inner, root, f"{place}.{key}")
    if isinstance(value, list):
        assert len(value) >= schema.get("minItems", 0), place
        for n, part in enumerate(value):
            validate(part, schema.get("items", {}), root, f"{place}[{n}]")
    return None


def _valid(value, schema, root):
    try:
        validate(value, schema, root)
    except AssertionError:
        return False
    return True

"""What a record of Every Eval Ever 0.3.0 must have: `SCHEMA` states the entries that our export uses.

If the package `every_eval_ever` is installed, tests read the schema that comes with it as well.
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

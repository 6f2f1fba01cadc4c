"""Which names of requests are used as a client gave them: in a header, or in a body's request_id.

vLLM repeats a name in every chunk and log line. Pure; for deployments/edge and deployments/engine.
"""

from __future__ import annotations

import re

NAME_CHARS_MAX = 128
VALID_NAME = re.compile(rf"[A-Za-z0-9._:-]{{1,{NAME_CHARS_MAX}}}")

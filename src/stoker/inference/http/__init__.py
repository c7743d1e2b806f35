"""Model servers over HTTP: vLLM, SGLang and whatever speaks the OpenAI API.

``link`` sends one question and names what went wrong · ``bodies`` and ``answers`` are the fields,
as pure functions · ``rendering`` continues a history by exact ids · ``probe`` learns what a server
offers · ``watch`` looks at its metrics, weights and pauses · ``replica`` is one server ·
``model`` is the model made of them · ``control`` pauses, reloads and resumes servers.
Needs the extra ``http``. Why it is as it is: docs/design/0006-http-models.md.
"""

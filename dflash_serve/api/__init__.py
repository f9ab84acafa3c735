"""The OpenAI surface, in two halves that meet in `protocol`.

HTTP side (ingress): `app` has the routes, `schema` and `options` read requests, `responses` and
`streaming` write answers, `failures` and `boundary` the errors, `info` the /server_info page.
Text side (replica): `replica` runs a request on an engine, with `codec`, `detokenize` and `stops`.
"""

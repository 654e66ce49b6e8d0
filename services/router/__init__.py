"""The router: OpenAI's chat API in front of the stages. To read it, follow a request:

app > endpoints > session      the process, its paths, one chat request at the HTTP edge
  client_link, api_types, data_url, prompt          what comes in: body, fields, pictures, tokens
  retry > attempt > picture_stages, text_stages > dispatch     attempts, the stages of one, an instance for each
    load_book, uploads, token_streams, releases     what dispatch knows, and what travels beside requests
  detokenizer, responses, sse, http_errors          what goes out
record, router_metrics                              what a request has been through, and the sum of that
"""

"""Documents in the order of their relevance, over plain HTTP. Needs `archerfish serve`."""

import json
import sys
import urllib.request

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
documents = ["Bread is baked.", "The archerfish spits at its prey.", "Cats sleep a lot."]
body = {"query": "How do fish catch insects?", "documents": documents}
request = urllib.request.Request(f"{url}/v1/rerank", json.dumps(body).encode(), {"Content-Type": "application/json"})
with urllib.request.urlopen(request) as answer:
    for result in json.load(answer)["results"]:
        print(f"{result['relevance_score']:.2f} {documents[result['index']]}")

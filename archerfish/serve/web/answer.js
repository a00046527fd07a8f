// Asks the server for the next message of a conversation, and fills a node with what comes.

import {stream} from "./api.js";

const NUM_TOP = 5; // alternatives of each token

/** The messages of a request: those on the way to an answer, without answers that failed. */
export function messagesOf(settings, path) {
  const messages = settings.system?.trim() ? [{role: "system", content: settings.system}] : [];
  for (const node of path) {
    if (node.role === "tool") messages.push({role: "tool", tool_call_id: node.callId, content: node.content});
    else if (node.role === "user") messages.push({role: "user", content: node.content});
    else if (node.calls?.length) {
      const calls = node.calls.map(({id, name, text}) => ({id, type: "function", function: {name, arguments: text}}));
      messages.push({role: "assistant", content: node.content || null, tool_calls: calls});
    } else if (node.content) messages.push({role: "assistant", content: node.content});
  }
  return messages;
}

/** The body of a request. What is not set is not sent. isResumed: the last message is the start of the answer. */
export function bodyOf(settings, path, isResumed = false) {
  const body = {
    model: settings.model, messages: messagesOf(settings, path), stream: true,
    stream_options: {include_usage: true, continuous_usage_stats: true}, ...settings.params,
  };
  if (settings.tokens) Object.assign(body, {logprobs: true, top_logprobs: NUM_TOP});
  if (settings.format?.isOn) {
    body.response_format = {type: "json_schema", json_schema: {name: "answer", schema: JSON.parse(settings.format.text)}};
  }
  if (settings.tools?.isOn) {
    body.tools = JSON.parse(settings.tools.text);
    const {choice} = settings.tools;
    if (choice) body.tool_choice = ["auto", "none", "required"].includes(choice) ? choice : {type: "function", function: {name: choice}};
  }
  if (isResumed) body.continue_final_message = true;
  return body;
}

/** Streams an answer into its node; onchange is called after each event. Throws nothing: an error becomes part of the node. */
export async function fillAnswer(node, makeBody, {signal, onchange}) {
  const began = performance.now();
  Object.assign(node, {error: undefined, finish: undefined, usage: undefined, firstMs: undefined, isStopped: undefined});
  try {
    const body = makeBody();
    node.model = body.model;
    for await (const event of stream("/v1/chat/completions", body, {signal, onremark: (remark) => { node.remark = remark; }})) {
      const choice = event.choices[0];
      if (choice) addChoice(node, choice);
      if (event.usage) node.usage = readUsage(event.usage);
      const now = performance.now() - began;
      if (node.firstMs === undefined && choice && hasText(choice.delta)) node.firstMs = now;
      node.totalMs = now;
      onchange();
    }
  } catch (error) {
    if (error.name === "AbortError") node.isStopped = true;
    else node.error = {message: error.message, hint: error.hint ?? "", status: error.status ?? 0};
  }
}

const hasText = (delta) => Boolean(delta.content || delta.reasoning_content || delta.tool_calls);

function addChoice(node, {delta, logprobs, finish_reason: finish}) {
  if (delta.content) node.content += delta.content;
  if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
  for (const {index, id, function: part} of delta.tool_calls ?? []) {
    node.calls ??= [];
    node.calls[index] ??= {id, name: part.name, text: ""};
    node.calls[index].text += part.arguments ?? "";
  }
  for (const token of logprobs?.content ?? []) {
    const top = token.top_logprobs.map((one) => [one.token, one.logprob]);
    (node.tokens ??= []).push({bytes: token.bytes, logprob: token.logprob, top});
  }
  if (finish) node.finish = finish;
}

function readUsage(usage) {
  const {prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details} = usage;
  return {prompt, output, cached: details?.cached_tokens ?? 0};
}

/** What is told below an answer. */
export function statistics({usage, firstMs, totalMs, finish, isStopped, remark}) {
  const told = [];
  if (usage) {
    told.push(`${usage.output} ${usage.output === 1 ? "token" : "tokens"}`);
    const seconds = (totalMs - firstMs) / 1000;
    if (usage.output > 1 && seconds > 0) told.push(`${((usage.output - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (firstMs !== undefined) told.push(`first after ${firstMs < 1000 ? `${firstMs.toFixed(0)} ms` : `${(firstMs / 1000).toFixed(1)} s`}`);
  if (usage) told.push(`${usage.cached} of ${usage.prompt} prompt tokens cached`);
  if (isStopped) told.push("stopped");
  else if (finish === "length") told.push("cut off");
  if (remark) told.push(remark);
  return told;
}

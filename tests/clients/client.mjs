// One request of a Node SDK: the argument says which, lines of JSON say what came. A line on stdin: leave.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const asked = JSON.parse(process.argv[2]);
const write = (line) => process.stdout.write(JSON.stringify(line) + "\n");
const leaving = new AbortController();
process.stdin.once("data", () => leaving.abort());
const person = z.object({
  name: z.enum(["Ada Lovelace", "Alan Turing"]),
  born: z.number().int().min(1800).max(1999),
});

function openai() {
  const client = new OpenAI({ baseURL: asked.url + "/v1", apiKey: asked.key, maxRetries: asked.retries });
  const completions = client.chat.completions;
  const body = {
    model: asked.model,
    messages: [{ role: "user", content: asked.prompt }],
    max_tokens: asked.maxTokens,
    temperature: 0,
    ...asked.fields,
  };
  const options = { signal: leaving.signal };
  return {
    answer: async () => (await completions.create(body)).choices[0].message.content,
    stream: async () => {
      for await (const chunk of await completions.create({ ...body, stream: true }, options)) {
        if (chunk.choices[0]?.delta.content) write({ text: chunk.choices[0].delta.content });
      }
      return null;
    },
    person: async () => {
      const format = zodResponseFormat(person, "person");
      return (await completions.parse({ ...body, response_format: format })).choices[0].message.parsed;
    },
    call: async () => {
      const definition = { name: asked.tool, parameters: asked.parameters };
      const named = { type: "function", function: { name: asked.tool } };
      const answer = await completions.create({
        ...body,
        tools: [{ type: "function", function: definition }],
        tool_choice: asked.choice === "named" ? named : asked.choice,
        parallel_tool_calls: false,
      });
      const [call] = answer.choices[0].message.tool_calls;
      return { name: call.function.name, arguments: JSON.parse(call.function.arguments) };
    },
  };
}

function ai() {
  const provider = createOpenAICompatible({
    name: "served",
    baseURL: asked.url + "/v1",
    apiKey: asked.key,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  const request = {
    model: provider(asked.model),
    prompt: asked.prompt,
    maxOutputTokens: asked.maxTokens,
    temperature: 0,
    maxRetries: asked.retries,
    ...asked.fields,
  };
  return {
    answer: async () => (await generateText(request)).text,
    stream: async () => {
      // Its errors are parts of the stream; without onError it writes them to the console as well.
      const { fullStream } = streamText({ ...request, abortSignal: leaving.signal, onError: () => {} });
      for await (const part of fullStream) {
        if (part.type === "error") throw part.error;
        if (part.type === "text-delta") write({ text: part.text });
      }
      return null;
    },
    person: async () => (await generateText({ ...request, output: Output.object({ schema: person }) })).output,
    call: async () => {
      const tools = { [asked.tool]: tool({ inputSchema: jsonSchema(asked.parameters) }) };
      const named = { type: "tool", toolName: asked.tool };
      const toolChoice = asked.choice === "named" ? named : asked.choice;
      const [call] = (await generateText({ ...request, tools, toolChoice })).toolCalls;
      return { name: call.toolName, arguments: call.input };
    },
  };
}

try {
  write({ value: await { openai, ai }[asked.sdk]()[asked.operation]() });
} catch (error) {
  const last = error?.lastError ?? error; // what the AI SDK's retries ended with
  const kind = last?.name?.startsWith("AI_") ? last.name : (last?.constructor?.name ?? typeof last);
  const status = last?.statusCode ?? last?.status ?? null;
  write({ error: kind, message: String(last?.message ?? JSON.stringify(last)), status });
}
process.exit(0);

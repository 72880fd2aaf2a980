"""smolagents: an agent that calls tools, one that writes code, and the same with structured output inside."""

from __future__ import annotations

from checks import URL, expect, run, weather
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(model_id="default", api_base=f"{URL}/v1", api_key="none")
forecast = tool(weather)


def tool_calling_agent() -> None:
    """Calls of tools, the last of which is the answer; two turns."""
    agent = ToolCallingAgent(tools=[forecast], model=model)
    expect(agent.run("How is the weather in Paris? step:smol-look"), "sunny in Paris")
    expect(agent.run("And now? step:smol-look", reset=False), "sunny in Paris")


def code_agent() -> None:
    """Code that calls tools."""
    agent = CodeAgent(tools=[forecast], model=model)
    expect(agent.run("How is the weather in Paris? step:smol-code"), "sunny in Paris")


def code_agent_streamed() -> None:
    """The same, its output streamed."""
    agent = CodeAgent(tools=[forecast], model=model, stream_outputs=True)
    expect(agent.run("How is the weather in Paris? step:smol-code"), "sunny in Paris")


def code_agent_structured() -> None:
    """Code inside JSON of a schema."""
    agent = CodeAgent(tools=[forecast], model=model, use_structured_outputs_internally=True)
    expect(agent.run("How is the weather in Paris? step:smol-json"), "sunny in Paris")


run(tool_calling_agent, code_agent, code_agent_streamed, code_agent_structured)

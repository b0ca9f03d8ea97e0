// Requests of the practice page: answers as JSON, and the experiments that it starts.

const token = document.querySelector('meta[name="token"]').content;

/** Returns the answer to a request; an error carries what the server says. */
async function answer(response) {
  if (!response.ok) throw new Error((await response.text()).trim() || `the server answers ${response.status}`);
  return response.json();
}

export async function get(path) {
  return answer(await fetch(path));
}

/** Starts the experiment of a card and returns its result; `progress` gets its states. With answers it is a review. */
export async function runExperiment(body, progress) {
  const started = await answer(await fetch("/api/runs", {
    method: "POST",
    headers: { "content-type": "application/json", "x-meshwright-token": token },
    body: JSON.stringify(body),
  }));
  return new Promise((resolve, reject) => {
    const source = new EventSource(`/api/runs/${started.run}/events`);
    let failures = 0;
    source.onmessage = (event) => {
      failures = 0;
      const job = JSON.parse(event.data);
      progress(job);
      if (job.state !== "done") return;
      source.close();
      resolve(job.result);
    };
    source.onerror = () => {
      failures += 1;
      if (failures < 5) return; // the browser connects again by itself
      source.close();
      reject(new Error("the connection to the server is lost; does meshwright practice --page still run?"));
    };
  });
}

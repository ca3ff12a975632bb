//! The round trip of iceoryx2's request-response between two processes that spin, each on a CPU of its own: a reference
//! point for an empty request of statecopy.
//!
//! `cargo run --release --manifest-path tests/iceoryx2-reference/Cargo.toml [TRIALS]`. It starts itself again as the server.

use std::env;
use std::error::Error;
use std::hint::spin_loop;
use std::num::NonZeroUsize;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use iceoryx2::prelude::*;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The request that ends the server.
const END: u64 = u64::MAX;
/// The argument that makes this process the server of the service that is named next.
const SERVER: &str = "--server";
/// Round trips before those that count.
const WARM_UP: usize = 1000;
/// How long the server waits for a client, and a client for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    set_log_level(LogLevel::Error);
    let arguments: Vec<String> = env::args().skip(1).collect();
    let cpus = two_cpus()?;
    match &arguments[..] {
        [flag, name] if flag == SERVER => serve(name, cpus[1]),
        [] => measure(10_000, cpus),
        [trials] => measure(trials.parse::<NonZeroUsize>()?.get(), cpus),
        _ => Err("One argument: how many round trips".into()),
    }
}

/// The first two CPUs that this process may use.
fn two_cpus() -> Result<[usize; 2], Box<dyn Error>> {
    let allowed = sched_getaffinity(None)?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    match (cpus.next(), cpus.next()) {
        (Some(first), Some(second)) => Ok([first, second]),
        _ => Err("Two CPUs are needed".into()),
    }
}

fn pin_to(cpu: usize) -> Result<(), Box<dyn Error>> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

fn serve(name: &str, cpu: usize) -> Result<(), Box<dyn Error>> {
    pin_to(cpu)?;
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let service =
        node.service_builder(&name.try_into()?).request_response::<u64, u64>().open_or_create()?;
    let server = service.server_builder().create()?;
    let mut heard = Instant::now();
    while heard.elapsed() < ANSWER_MAX {
        // The clock is looked at once in so many turns only.
        for _ in 0..1 << 16 {
            let Some(request) = server.receive()? else {
                spin_loop();
                continue;
            };
            let value = *request;
            if value == END {
                return Ok(());
            }
            request.loan_uninit()?.write_payload(value + 1).send()?;
            heard = Instant::now();
        }
    }
    Err("No client asked for anything".into())
}

fn measure(trials: usize, cpus: [usize; 2]) -> Result<(), Box<dyn Error>> {
    let name = format!("statecopy-reference-{}", std::process::id());
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let service = node
        .service_builder(&name.as_str().try_into()?)
        .request_response::<u64, u64>()
        .open_or_create()?;
    let client = service.client_builder().create()?;
    // The server inherits this process's CPUs: it starts before this one stays on one of them.
    let mut server =
        Command::new(env::current_exe()?).args([SERVER, &name]).stdin(Stdio::null()).spawn()?;
    let deadline = Instant::now() + ANSWER_MAX;
    while service.dynamic_config().number_of_servers() == 0 {
        if Instant::now() >= deadline {
            return Err("The server did not come".into());
        }
        std::thread::yield_now();
    }
    pin_to(cpus[0])?;
    let mut samples = Vec::with_capacity(trials);
    for trial in 0..WARM_UP + trials {
        let value = trial as u64;
        let start = Instant::now();
        let pending = client.loan_uninit()?.write_payload(value).send()?;
        let answer = loop {
            if let Some(answer) = pending.receive()? {
                break *answer;
            }
            spin_loop();
        };
        let took = start.elapsed();
        if answer != value + 1 {
            return Err("The answer is of another request".into());
        }
        if trial >= WARM_UP {
            samples.push(took);
        }
    }
    client.send_copy(END)?;
    server.wait()?;
    samples.sort_unstable();
    let at = |percent: usize| samples[(samples.len() - 1) * percent / 100].as_secs_f64() * 1e6;
    println!(
        "iceoryx2 request-response, {trials} round trips, CPUs {} and {}: p5 {:.3} us, p50 {:.3} us, p95 {:.3} us",
        cpus[0],
        cpus[1],
        at(5),
        at(50),
        at(95)
    );
    Ok(())
}

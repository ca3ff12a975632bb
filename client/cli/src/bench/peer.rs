//! The bare ping-pong: two processes, one shared word, no daemon. What a request is compared with.
//!
//! The peer is this program again. It sleeps unless it is asked to play, so that it takes nothing from the executor, whose
//! CPU it shares.
//!
//! ```text
//! resting ──command──> playing (spinning, or asleep between two turns) ──word = OVER──> resting
//!    └──command = END, or the other side is gone──> ended
//! ```
//!
//! * *command*: the peer says in `ACK` that it plays now.
//! * *playing*: where the word is odd it is the peer's turn, and the peer adds one.
//! * *word = OVER*: the peer rests again, and says so in `ACK`.

use std::hint::spin_loop;
use std::io;
use std::os::fd::AsFd;
use std::process::{Child, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::io::Errno;
use rustix::thread::futex;
use statecopy_descriptors::{Mapping, SealedMemory};

use super::machine::{Thread, pin_to};
use crate::cli::BenchPeerOptions;
use crate::spawn;

/// Where the words lie: each on cache lines of its own.
const WORD: u64 = 0;
const COMMAND: u64 = 256;
const ACK: u64 = 512;
const BYTES: u64 = 4096;

/// Values of `COMMAND` and `ACK`.
const REST: u32 = 0;
const SPIN: u32 = 1;
const FUTEX: u32 = 2;
const END: u32 = 3;
/// Said once, in `ACK`: the peer is there.
const READY: u32 = 4;

/// The value of the word that ends a game. It is even: the peer's turn never comes by counting up to it.
const OVER: u32 = u32::MAX - 1;
/// Turns after which the counting starts anew.
const TURNS_MAX: u32 = 1 << 30;

/// How long one side waits for the other.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Between two looks at the clock while it spins.
const SPINS_PER_LOOK: u32 = 1 << 16;

/// How the two sides wait for their turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Game {
    /// Both spin.
    Spin,
    /// Both sleep.
    Futex,
}

impl Game {
    fn command(self) -> u32 {
        match self {
            Self::Spin => SPIN,
            Self::Futex => FUTEX,
        }
    }
}

/// The other process, and this side's hold on the word.
#[derive(Debug)]
pub(super) struct Peer {
    child: Child,
    thread: Thread,
    table: Mapping,
    turn: u32,
}

impl Peer {
    /// Starts it, on that CPU.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(super) fn start(cpu: usize) -> anyhow::Result<Self> {
        let memory = SealedMemory::create("ping-pong", BYTES)?;
        let table = memory.map()?;
        let child = spawn::again("bench-peer")
            .args(["--cpu", &cpu.to_string()])
            .stdin(Stdio::from(memory.try_clone_fd()?))
            .spawn()
            .context("Starting the ping-pong's other side")?;
        let thread = Thread::main_of(child.id());
        let peer = Self { child, thread, table, turn: 0 };
        peer.await_ack(READY)?;
        Ok(peer)
    }

    /// Begins a game.
    pub(super) fn begin(&mut self, game: Game) -> anyhow::Result<()> {
        self.turn = 0;
        self.table.atomic_u32(WORD)?.store(0, Ordering::Release);
        tell(&self.table, COMMAND, game.command())?;
        self.await_ack(game.command())
    }

    /// Ends it.
    pub(super) fn end(&mut self) -> anyhow::Result<()> {
        tell(&self.table, WORD, OVER)?;
        self.await_ack(REST)
    }

    /// One round trip while both spin.
    pub(super) fn spin_round(&mut self) -> anyhow::Result<Duration> {
        let word = self.table.atomic_u32(WORD)?;
        let mine = self.turn % TURNS_MAX + 1;
        let start = Instant::now();
        word.store(mine, Ordering::Release);
        let mut spins = 0;
        while word.load(Ordering::Acquire) == mine {
            spin_loop();
            spins += 1;
            if spins % SPINS_PER_LOOK == 0 && start.elapsed() > ANSWER_MAX {
                bail!("The ping-pong's other side does not answer");
            }
        }
        let took = start.elapsed();
        self.turn = mine + 1;
        Ok(took)
    }

    /// One round trip with the other side asleep at its start, and this side asleep until its end.
    pub(super) fn futex_round(&mut self) -> anyhow::Result<Duration> {
        self.thread.wait_until_asleep()?;
        let word = self.table.atomic_u32(WORD)?;
        let mine = self.turn % TURNS_MAX + 1;
        let start = Instant::now();
        tell(&self.table, WORD, mine)?;
        while word.load(Ordering::Acquire) == mine {
            sleep_on(&self.table, WORD, mine)?;
            if start.elapsed() > ANSWER_MAX {
                bail!("The ping-pong's other side does not answer");
            }
        }
        let took = start.elapsed();
        self.turn = mine + 1;
        Ok(took)
    }

    fn await_ack(&self, wanted: u32) -> anyhow::Result<()> {
        let ack = self.table.atomic_u32(ACK)?;
        let deadline = Instant::now() + ANSWER_MAX;
        while ack.load(Ordering::Acquire) != wanted {
            if Instant::now() >= deadline {
                bail!("The ping-pong's other side does not answer");
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It holds nothing that would have to be put away.
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The hidden subcommand: this process becomes the other side. Standard input is the shared memory.
pub(crate) fn be_peer(options: &BenchPeerOptions) -> ExitCode {
    match play(options.cpu) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => crate::failure::report(&error),
    }
}

fn play(cpu: usize) -> anyhow::Result<()> {
    spawn::end_with_parent()?;
    let descriptor = io::stdin().as_fd().try_clone_to_owned().context("Standard input")?;
    let table = SealedMemory::adopt(descriptor, BYTES)?.map()?;
    pin_to(cpu)?;
    let command = table.atomic_u32(COMMAND)?;
    let ack = table.atomic_u32(ACK)?;
    ack.store(READY, Ordering::Release);
    loop {
        match command.load(Ordering::Acquire) {
            SPIN => spin(&table)?,
            FUTEX => sleep_and_answer(&table)?,
            END => return Ok(()),
            resting => {
                sleep_on(&table, COMMAND, resting)?;
                continue;
            }
        }
        command.store(REST, Ordering::Release);
        ack.store(REST, Ordering::Release);
    }
}

/// Answers turns as fast as they are seen.
// SYNC: each side's release store of the word is read by the other side's acquire load; nothing else is handed over.
fn spin(table: &Mapping) -> anyhow::Result<()> {
    let word = table.atomic_u32(WORD)?;
    table.atomic_u32(ACK)?.store(SPIN, Ordering::Release);
    loop {
        let value = word.load(Ordering::Acquire);
        if value % 2 == 1 {
            word.store(value + 1, Ordering::Release);
        } else if value == OVER {
            return Ok(());
        } else {
            spin_loop();
        }
    }
}

/// Answers turns and sleeps between them.
fn sleep_and_answer(table: &Mapping) -> anyhow::Result<()> {
    let word = table.atomic_u32(WORD)?;
    table.atomic_u32(ACK)?.store(FUTEX, Ordering::Release);
    loop {
        let value = word.load(Ordering::Acquire);
        if value % 2 == 1 {
            tell(table, WORD, value + 1)?;
        } else if value == OVER {
            return Ok(());
        } else {
            sleep_on(table, WORD, value)?;
        }
    }
}

/// Stores a word and wakes whoever sleeps on it.
fn tell(table: &Mapping, at: u64, value: u32) -> anyhow::Result<()> {
    let word = table.atomic_u32(at)?;
    word.store(value, Ordering::Release);
    futex::wake(word, futex::Flags::empty(), 1).context("Waking the other side")?;
    Ok(())
}

/// Sleeps while the word has that value: until it is woken, at most a second.
fn sleep_on(table: &Mapping, at: u64, value: u32) -> anyhow::Result<()> {
    let second = futex::Timespec { tv_sec: 1, tv_nsec: 0 };
    match futex::wait(table.atomic_u32(at)?, futex::Flags::empty(), value, Some(&second)) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
        Err(error) => Err(error).context("Sleeping on a word"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    /// Both sides of the protocol in one process; the sides of a benchmark are two.
    #[test]
    fn the_other_side_answers_every_turn_of_either_game_until_it_is_over() {
        for game in [Game::Spin, Game::Futex] {
            let table = Arc::new(SealedMemory::create("t", BYTES).unwrap().map().unwrap());
            let other = Arc::clone(&table);
            let playing = thread::spawn(move || match game {
                Game::Spin => spin(&other),
                Game::Futex => sleep_and_answer(&other),
            });
            let word = table.atomic_u32(WORD).unwrap();
            let deadline = Instant::now() + Duration::from_secs(20);
            for turn in (1..201).step_by(2) {
                tell(&table, WORD, turn).unwrap();
                while word.load(Ordering::Acquire) != turn + 1 {
                    assert!(Instant::now() < deadline, "{game:?} {turn}");
                    thread::yield_now();
                }
            }
            tell(&table, WORD, OVER).unwrap();
            playing.join().unwrap().unwrap();
        }
    }
}

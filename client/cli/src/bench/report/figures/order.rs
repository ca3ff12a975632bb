//! The figures of copies in a stream's order.

use super::super::super::order::{How, Idle, StreamOrder, Who, chain_name};
use super::super::super::statistics::median;
use super::Figure;

/// How much longer a chain through the daemon may take than in one process, where MPS shares the device.
const CHAINS: [(How, u64, f64); 5] = [
    (How::Stream, 1, 1.55),
    (How::Stream, 64, 1.3),
    (How::Graph, 1, 3.0),
    (How::Graph, 8, 2.4),
    (How::Graph, 64, 1.5),
];
/// CPU time of an executor that nobody asks anything of, in percent of one CPU.
const IDLE: [(Idle, f64); 3] = [(Idle::Open, 0.5), (Idle::Armed, 5.0), (Idle::Unrung, 5.0)];

/// Those that were measured. Without MPS chains have no bound: the device goes from one process to the other in each.
pub(super) fn figures(order: &StreamOrder) -> Vec<Figure> {
    let shared = order.mps == Some(true);
    let chains = CHAINS.iter().filter(|_| shared).filter_map(|(how, selected, bound)| {
        let chain = order.chain_us.get(&chain_name(*how, *selected))?;
        let us = |who: Who| chain.get(who.label()).map(|samples| median(samples));
        let (daemon, own) = (us(Who::Daemon)?, us(Who::InProcess)?);
        let what = format!("chain {}: daemon / inproc", chain_name(*how, *selected));
        Some(Figure::at_most(what, daemon / own, *bound, ""))
    });
    let idle = IDLE.iter().filter_map(|(idle, bound)| {
        let percent = order.idle_cpu_percent.get(idle.label())?;
        Some(Figure::at_most(
            format!("idle executor, {}: CPU", idle.label()),
            *percent,
            *bound,
            " %",
        ))
    });
    chains.chain(idle).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(mps: bool) -> StreamOrder {
        let mut order = StreamOrder { mps: Some(mps), ..StreamOrder::default() };
        for (how, selected, bound) in CHAINS {
            let us = |who: Who| match who {
                Who::Daemon | Who::Control => vec![10.0 * bound],
                Who::InProcess => vec![10.0],
            };
            let samples = Who::ALL.map(|who| (who.label().to_owned(), us(who)));
            order.chain_us.insert(chain_name(how, selected), samples.into());
        }
        order.idle_cpu_percent = IDLE.map(|(idle, bound)| (idle.label().to_owned(), bound)).into();
        order
    }

    #[test]
    fn every_chain_and_every_idle_executor_has_its_bound_under_mps() {
        let mut order = seen(true);
        let all = figures(&order);
        assert_eq!(all.len(), CHAINS.len() + IDLE.len());
        assert!(all.iter().all(Figure::is_reached));
        for chain in order.chain_us.values_mut() {
            chain.insert(Who::InProcess.label().to_owned(), vec![9.0]);
        }
        assert!(figures(&order)[..CHAINS.len()].iter().all(|figure| !figure.is_reached()));
    }

    #[test]
    fn without_mps_only_the_idle_executor_has_bounds() {
        assert_eq!(figures(&seen(false)).len(), IDLE.len());
    }
}

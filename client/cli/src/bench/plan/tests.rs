//! What the plan of a run promises.

use std::collections::BTreeSet;

use super::*;

fn all() -> impl Iterator<Item = Case> {
    [Kind::Host, Kind::Cuda].into_iter().flat_map(Case::all)
}

fn timed(trial: u64) -> Turn {
    Turn { trial, place: 0, timed: true }
}

#[test]
fn the_cases_are_those_of_the_method_and_their_names_differ() {
    let names: BTreeSet<String> = Case::all(Kind::Host).into_iter().map(Case::name).collect();
    assert_eq!(names.len(), Case::all(Kind::Host).len());
    assert_eq!(names.len(), 4 + 3 * (3 + 4 + 4));
    for name in
        ["empty", "empty_after_sleep", "batch69", "kimi-k3-tp8/s64/clear", "24576/s32/scatter"]
    {
        assert!(names.contains(name), "{name} is missing in {names:?}");
    }
}

#[test]
fn rows_have_the_sizes_that_their_names_say_and_caches_hold_what_is_selected() {
    assert_eq!(Preset::Tiny.state_bytes(), 24_576);
    assert_eq!(Preset::KimiLinear.state_bytes(), 262_144);
    assert_eq!(Preset::KimiK3Tp8.state_bytes(), 786_432);
    for case in all() {
        assert!(case.selected() <= case.cache().rows, "{}", case.name());
    }
    let memcpy = Case { kind: Kind::Host, work: Work::Memcpy, rival: false };
    assert!(memcpy.packed_bytes() >= 64 << 20);
}

#[test]
fn every_copy_is_measured_on_every_path_in_both_modes() {
    for case in all() {
        let measured: BTreeSet<Measurement> = case.measurements().into_iter().collect();
        assert_eq!(measured.len(), case.measurements().len(), "{}", case.name());
        if let Work::Copy { .. } | Work::Batch | Work::Empty = case.work {
            for (mode, path) in
                Mode::ALL.into_iter().flat_map(|mode| Path::COPIES.map(|path| (mode, path)))
            {
                assert!(measured.contains(&(mode, path)), "{} {path:?}", case.name());
            }
        }
    }
}

#[test]
fn every_path_that_copies_is_checked_before_it_is_timed() {
    for case in all() {
        let checked = case.checked();
        for (mode, path) in case.measurements() {
            let found = checked.contains(&(mode, path)) || checked.contains(&(Mode::Wall, path));
            assert_eq!(found, !path.is_reference(), "{} {mode:?} {path:?}", case.name());
        }
    }
}

#[test]
fn each_trial_has_an_order_of_its_own_which_the_seed_alone_decides() {
    let case = Case { kind: Kind::Host, work: Work::Empty, rival: false };
    let sorted = |mut order: Vec<Measurement>| {
        order.sort_unstable();
        order
    };
    let mut orders = Vec::new();
    for trial in 0..50 {
        let order = case.order(7, trial);
        assert_eq!(order, case.order(7, trial));
        assert_eq!(sorted(order.clone()), sorted(case.measurements()));
        orders.push(order);
    }
    orders.dedup();
    assert_eq!(orders.len(), 50);
    assert_ne!(case.order(7, 0), case.order(8, 0));
}

#[test]
fn every_path_takes_every_place_in_the_order_about_equally_often() {
    let case = Case { kind: Kind::Host, work: Work::Empty, rival: false };
    let count = case.measurements().len();
    let mut first = 0;
    for trial in 0..1300 {
        first += usize::from(case.order(1, trial)[0] == (Mode::Wall, Path::Ring));
    }
    let expected = 1300 / count;
    assert!(first.abs_diff(expected) < expected / 2, "{first} of 1300, {expected} expected");
}

#[test]
fn a_trial_selects_each_row_once() {
    let case = Case::chosen(Kind::Host, &["262144/s128/gather".to_owned()])[0];
    let indices = case.indices(3, timed(5), 192);
    let distinct: BTreeSet<i32> = indices.iter().copied().collect();
    assert_eq!((indices.len(), distinct.len()), (128, 128));
    assert!(indices.iter().all(|index| (0..192).contains(index)));
    assert_ne!(indices, case.indices(3, timed(6), 192));
}

#[test]
fn calls_on_a_gpu_select_distinct_rows_and_take_all_rows_in_turn() {
    for (name, rows) in [("kimi-k3-tp8/s64/gather", 512), ("batch", 24), ("24576/s1/clear", 7)] {
        let case = Case::chosen(Kind::Cuda, &[name.to_owned()])[0];
        let places = case.measurements().len() as u64;
        let turns = (0..).flat_map(|trial| (0..places).map(move |place| (trial, place)));
        let turns = turns
            .flat_map(|(trial, place)| [false, true].map(|timed| Turn { trial, place, timed }));
        let calls = usize::try_from(rows / case.selected()).unwrap();
        let taken: Vec<i32> =
            turns.take(calls).flat_map(|turn| case.indices(9, turn, rows)).collect();
        let distinct: BTreeSet<i32> = taken.iter().copied().collect();
        assert_eq!(distinct.len(), taken.len(), "{name}");
        assert!(taken.iter().all(|row| (0..i32::try_from(rows).unwrap()).contains(row)));
        assert_eq!(taken.len() as u64, case.selected() * calls as u64);
    }
}

#[test]
fn a_gpu_walks_through_more_memory_than_its_cache_holds() {
    for case in Case::all(Kind::Cuda).into_iter().filter(|case| case.selected() > 0) {
        let cache = case.cache();
        let bytes = cache.rows * cache.layers as u64 * cache.preset.state_bytes();
        assert!(bytes >= 96 << 20, "{}", case.name());
        let packed = case.packed_bytes() * case.buffers();
        assert!(packed >= ROTATED_BYTES.min(64 * case.packed_bytes()), "{}", case.name());
    }
}

#[test]
fn a_rival_measures_the_cases_of_one_layer_and_checks_its_own_bytes() {
    for case in Case::all(Kind::Cuda).into_iter().map(|case| Case { rival: true, ..case }) {
        let rivals = |measured: Vec<Measurement>| {
            measured.into_iter().filter(|(_, path)| path.is_rival()).count()
        };
        let expected = if matches!(case.work, Work::Copy { .. }) { Path::RIVALS.len() } else { 0 };
        assert_eq!(rivals(case.measurements()), expected, "{}", case.name());
        assert_eq!(rivals(case.checked()), 0, "{}", case.name());
    }
}

#[test]
fn a_case_is_chosen_by_any_part_of_its_name() {
    let names = |parts: &[&str]| -> Vec<String> {
        let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
        Case::chosen(Kind::Host, &parts).into_iter().map(Case::name).collect()
    };
    assert_eq!(names(&["24576/s8/"]), ["24576/s8/gather", "24576/s8/clear", "24576/s8/scatter"]);
    assert_eq!(names(&["empty"]), ["empty", "empty_after_sleep"]);
    assert_eq!(names(&["nothing like it"]), [""; 0]);
}

//! `PrefixLru` against a plain vector, oldest first.
use kvlane_policy::PrefixLru;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Push(u32),
    InsertOlder(u32, u32),
    InsertRun(Vec<u32>, Option<u32>),
    Remove(u32),
    Touch(u32),
    /// So many neighbours in the list, then these slots.
    TouchPrefix(usize, Vec<u32>),
    Take(usize, u32),
}

fn op() -> impl Strategy<Value = Op> {
    // Slots on both sides of a chunk boundary.
    let slot = || (4090u32..4106).prop_map(|slot| if slot % 2 == 0 { slot } else { slot - 4090 });
    prop_oneof![
        4 => slot().prop_map(Op::Push),
        2 => (slot(), slot()).prop_map(|(a, b)| Op::InsertOlder(a, b)),
        1 => (prop::collection::vec(slot(), 0..4), prop::option::of(slot())).prop_map(|(r, p)| Op::InsertRun(r, p)),
        2 => slot().prop_map(Op::Remove),
        2 => slot().prop_map(Op::Touch),
        2 => (0usize..6, prop::collection::vec(slot(), 0..6)).prop_map(|(run, s)| Op::TouchPrefix(run, s)),
        2 => (0usize..6, 1u32..4).prop_map(|(refusals, keep)| Op::Take(refusals, keep)),
    ]
}

fn touch(model: &mut Vec<u32>, slot: u32) {
    if let Some(at) = model.iter().position(|&s| s == slot) {
        model.remove(at);
        model.push(slot);
    }
}

proptest! {
    #[test]
    fn behaves_like_a_vector(ops in prop::collection::vec(op(), 1..120)) {
        let mut lru = PrefixLru::new();
        let mut model: Vec<u32> = Vec::new();
        for op in ops {
            match op {
                Op::Push(slot) if !model.contains(&slot) => {
                    lru.push_newest(slot);
                    model.push(slot);
                }
                Op::InsertOlder(slot, newer) if !model.contains(&slot) && model.contains(&newer) => {
                    lru.insert_older(slot, newer);
                    let at = model.iter().position(|&s| s == newer).unwrap();
                    model.insert(at, slot);
                }
                Op::InsertRun(mut run, parent) => {
                    run.sort_unstable();
                    run.dedup();
                    run.retain(|slot| !model.contains(slot));
                    lru.insert_run(run.iter().copied(), parent);
                    let at = parent.and_then(|parent| model.iter().position(|&slot| slot == parent));
                    let at = at.unwrap_or(model.len());
                    model.splice(at..at, run.iter().rev().copied());
                }
                Op::Push(_) | Op::InsertOlder(..) => {}
                Op::Remove(slot) => {
                    prop_assert_eq!(lru.remove(slot), model.contains(&slot));
                    model.retain(|&s| s != slot);
                }
                Op::Touch(slot) => {
                    lru.touch(slot);
                    touch(&mut model, slot);
                }
                Op::TouchPrefix(run, slots) => {
                    // Neighbours first, then any slots: what a prefix with and without holes looks like.
                    let mut prefix: Vec<u32> = model.iter().rev().skip(1).take(run).copied().collect();
                    prefix.extend(slots);
                    lru.touch_prefix(&prefix);
                    for &slot in prefix.iter().rev() {
                        touch(&mut model, slot);
                    }
                }
                Op::Take(max_refusals, divisor) => {
                    let accept = |slot: u32| slot.is_multiple_of(divisor);
                    let first = model.iter().take(max_refusals + 1).position(|&slot| accept(slot));
                    let refused = first.unwrap_or(model.len().min(max_refusals + 1));
                    model.rotate_left(refused);
                    let expected = first.map(|_| model.remove(0));
                    prop_assert_eq!(lru.take_oldest(max_refusals, accept), expected);
                }
            }
            prop_assert_eq!(lru.len(), model.len());
            prop_assert_eq!(lru.iter().collect::<Vec<_>>(), model.clone());
        }
    }
}

#[test]
fn a_touched_prefix_is_evicted_from_its_tail() {
    let mut lru = PrefixLru::new();
    for slot in [9, 1, 2, 3] {
        lru.push_newest(slot);
    }
    lru.touch_prefix(&[1, 2, 3]);
    let victims: Vec<_> = std::iter::from_fn(|| lru.take_oldest(0, |_| true)).collect();
    assert_eq!(victims, [9, 3, 2, 1]);
    assert!(lru.is_empty());
}

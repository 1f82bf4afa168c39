//! Descriptions: what the shards of each space consist of, in their workers' words. They show that equal layout digests
//! mean equal bytes, and explain why two engines of one namespace share no blocks.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};

use kvlane_block::{CutDigest, LayoutDifferences, LayoutDigest, Namespace, ShardLayout};

/// Most memory of all descriptions. Beyond that those of the oldest spaces are forgotten. Only the check and the
/// explanation are lost with them.
const MEMORY_MAX: usize = 64 << 20;

/// A shard as its worker registered it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) digest: LayoutDigest,
    pub(crate) layout: Option<Arc<ShardLayout>>,
}

/// A space with at least one described shard.
#[derive(Debug)]
struct DescribedSpace {
    namespace: Namespace,
    cut: CutDigest,
    /// One a rank, in rank order.
    shards: Vec<Shard>,
}

impl DescribedSpace {
    fn memory_bytes(&self) -> usize {
        let layouts = self.shards.iter().filter_map(|shard| shard.layout.as_ref());
        self.shards.len() * size_of::<Shard>() + layouts.map(|layout| layout.memory_bytes()).sum::<usize>()
    }
}

/// The descriptions of all spaces.
#[derive(Debug, Default)]
pub(crate) struct Descriptions {
    /// In the order in which they came.
    spaces: VecDeque<DescribedSpace>,
}

impl Descriptions {
    /// How a shard differs from one of the same namespace and digest that is described otherwise. A field that only one of
    /// them has is no contradiction.
    pub(crate) fn contradiction(&self, namespace: Namespace, shard: &Shard) -> Option<LayoutDifferences> {
        let mut of_namespace = self.spaces.iter().filter(|space| space.namespace == namespace);
        of_namespace.find_map(|space| contradiction(shard, &space.shards))
    }

    /// Keeps the shards of a space. When the space comes for the first time, returns how they differ from those of the
    /// namespace's last space of the same layers. An engine's groups have a space each, of other layers.
    pub(crate) fn keep(
        &mut self,
        namespace: Namespace,
        cut: CutDigest,
        shards: Vec<Shard>,
    ) -> Option<LayoutDifferences> {
        if shards.iter().all(|shard| shard.layout.is_none()) {
            return None;
        }
        if let Some(space) =
            self.spaces.iter_mut().find(|space| (space.namespace, space.cut) == (namespace, cut))
        {
            // Workers of an earlier version, which describe nothing, may have opened it.
            for (kept, shard) in space.shards.iter_mut().zip(shards) {
                kept.layout = kept.layout.take().or(shard.layout);
            }
            self.forget_the_oldest();
            return None;
        }
        let before = self
            .spaces
            .iter()
            .rfind(|space| space.namespace == namespace && share_a_layer(&shards, &space.shards));
        let difference = before.and_then(|before| first_difference(&shards, &before.shards));
        self.spaces.push_back(DescribedSpace { namespace, cut, shards });
        self.forget_the_oldest();
        difference
    }

    /// Forgets the spaces that the daemon has forgotten.
    pub(crate) fn retain(&mut self, is_alive: impl Fn(Namespace, CutDigest) -> bool) {
        self.spaces.retain(|space| is_alive(space.namespace, space.cut));
    }

    /// A space's layout in short; empty if no worker has described it.
    pub(crate) fn in_short(&self, namespace: Namespace, cut: CutDigest) -> String {
        let space = self.spaces.iter().find(|space| (space.namespace, space.cut) == (namespace, cut));
        let layouts = space.iter().flat_map(|space| &space.shards).filter_map(|shard| shard.layout.as_ref());
        let mut texts = layouts.map(|layout| layout.to_string());
        let Some(first) = texts.next() else { return String::new() };
        if texts.all(|text| text == first) { first } else { format!("{first} in the first shard") }
    }

    fn forget_the_oldest(&mut self) {
        let mut total = self.memory_bytes();
        while total > MEMORY_MAX
            && let Some(oldest) = self.spaces.pop_front()
        {
            total -= oldest.memory_bytes();
        }
    }

    fn memory_bytes(&self) -> usize {
        self.spaces.iter().map(DescribedSpace::memory_bytes).sum()
    }
}

/// The certain differences between a shard and the first of `others` with the same digest and a description. The others
/// agree with each other, so one comparison is enough.
pub(crate) fn contradiction<'a>(
    shard: &Shard,
    others: impl IntoIterator<Item = &'a Shard>,
) -> Option<LayoutDifferences> {
    let here = shard.layout.as_ref()?;
    let same = others.into_iter().filter(|other| other.digest == shard.digest);
    let there = same.filter_map(|other| other.layout.as_ref()).next()?;
    here.compare(there).err()?.certain()
}

fn share_a_layer(here: &[Shard], there: &[Shard]) -> bool {
    let names = |shards: &[Shard]| -> HashSet<String> {
        let layouts = shards.iter().filter_map(|shard| shard.layout.as_ref());
        layouts.flat_map(|layout| &layout.layers).map(|layer| layer.name.clone()).collect()
    };
    !names(here).is_disjoint(&names(there))
}

/// The differences of the first rank whose layouts differ. A rank that only one side has adds nothing to those of rank 0.
fn first_difference(here: &[Shard], there: &[Shard]) -> Option<LayoutDifferences> {
    let differ =
        |(here, there): (&Shard, &Shard)| here.layout.as_ref()?.compare(there.layout.as_ref()?).err();
    here.iter().zip(there).find_map(differ)
}

#[cfg(test)]
mod tests {
    use kvlane_block::{LayerLayout, ShardPlace};

    use super::*;

    const NAMESPACE: Namespace = Namespace([3; 16]);

    fn shard(digest: u8, element_bytes: u32) -> Shard {
        Shard {
            digest: LayoutDigest([digest; 16]),
            layout: Some(Arc::new(layout(element_bytes, "l.0".into()))),
        }
    }

    fn layout(element_bytes: u32, name: String) -> ShardLayout {
        let layer = LayerLayout {
            name,
            part: 0,
            dtype: "torch.bfloat16".into(),
            element_bytes,
            backend: String::new(),
            dimensions: Vec::new(),
            heads: None,
            tokens: Some(16),
        };
        let place = ShardPlace { index: 0, holders: 1, tensor_parallel: 1, pipeline_parallel: 1 };
        ShardLayout { place, layers: vec![layer] }
    }

    fn undescribed(digest: u8) -> Shard {
        Shard { layout: None, ..shard(digest, 2) }
    }

    fn cut(number: u8) -> CutDigest {
        CutDigest([number; 16])
    }

    #[test]
    fn a_digest_with_another_description_is_a_contradiction() {
        let mut descriptions = Descriptions::default();
        assert_eq!(descriptions.keep(NAMESPACE, cut(1), vec![shard(1, 2)]), None);
        let found = descriptions.contradiction(NAMESPACE, &shard(1, 4)).unwrap().to_string();
        assert_eq!(found, "layer l.0: torch.bfloat16 of 4 bytes here, torch.bfloat16 of 2 bytes there");
        for fine in [shard(1, 2), shard(2, 4), undescribed(1)] {
            assert_eq!(descriptions.contradiction(NAMESPACE, &fine), None);
        }
        assert_eq!(descriptions.contradiction(Namespace([4; 16]), &shard(1, 4)), None);
        assert_eq!(descriptions.in_short(NAMESPACE, cut(1)), "1 layer, bfloat16, 16 tokens");
        assert_eq!(descriptions.in_short(NAMESPACE, cut(2)), "");
    }

    #[test]
    fn another_layout_of_a_namespace_is_explained_when_it_comes_first() {
        let mut descriptions = Descriptions::default();
        descriptions.keep(NAMESPACE, cut(1), vec![shard(1, 2)]);
        let found = descriptions.keep(NAMESPACE, cut(2), vec![shard(2, 4), shard(3, 4)]).unwrap();
        assert!(found.to_string().contains("of 4 bytes here"), "{found}");
        for (number, shards) in [(1, vec![shard(1, 2)]), (2, vec![shard(2, 4), shard(3, 4)])] {
            assert_eq!(descriptions.keep(NAMESPACE, cut(number), shards), None);
        }
        // A space that the daemon has forgotten is compared with nothing.
        descriptions.retain(|namespace, known| namespace == NAMESPACE && known == cut(1));
        assert_eq!(descriptions.contradiction(NAMESPACE, &shard(2, 2)), None);
        descriptions.retain(|_, _| false);
        assert_eq!(descriptions.keep(NAMESPACE, cut(3), vec![shard(4, 8)]), None);
    }

    #[test]
    fn groups_of_one_engine_are_not_compared() {
        let mut descriptions = Descriptions::default();
        let of_layer = |digest: u8, name: &str, element_bytes: u32| {
            vec![Shard { layout: Some(Arc::new(layout(element_bytes, name.into()))), ..shard(digest, 2) }]
        };
        assert_eq!(descriptions.keep(NAMESPACE, cut(1), of_layer(1, "window", 2)), None);
        assert_eq!(descriptions.keep(NAMESPACE, cut(2), of_layer(2, "full", 2)), None);
        let found = descriptions.keep(NAMESPACE, cut(3), of_layer(3, "window", 4)).unwrap().to_string();
        assert_eq!(found, "layer window: torch.bfloat16 of 4 bytes here, torch.bfloat16 of 2 bytes there");
    }

    #[test]
    fn what_an_earlier_version_did_not_tell_a_later_one_may() {
        let mut descriptions = Descriptions::default();
        assert_eq!(descriptions.keep(NAMESPACE, cut(1), vec![undescribed(1), undescribed(2)]), None);
        assert!(descriptions.spaces.is_empty());
        descriptions.keep(NAMESPACE, cut(1), vec![shard(1, 2), undescribed(2)]);
        descriptions.keep(NAMESPACE, cut(1), vec![undescribed(1), shard(2, 4)]);
        assert!(descriptions.contradiction(NAMESPACE, &shard(1, 4)).is_some());
        assert!(descriptions.contradiction(NAMESPACE, &shard(2, 2)).is_some());
    }

    #[test]
    fn many_large_descriptions_push_out_the_oldest() {
        let mut descriptions = Descriptions::default();
        let large = |digest: u8| {
            let layer = layout(2, String::new()).layers.remove(0);
            let layers =
                (0..4096).map(|number| LayerLayout { name: format!("{number:0256}"), ..layer.clone() });
            let layout = ShardLayout { layers: layers.collect(), ..layout(2, String::new()) };
            Shard { digest: LayoutDigest([digest; 16]), layout: Some(Arc::new(layout)) }
        };
        for number in 0..60 {
            descriptions.keep(Namespace([number; 16]), cut(number), vec![large(number)]);
            assert!(descriptions.memory_bytes() <= MEMORY_MAX);
        }
        assert!((20..60).contains(&descriptions.spaces.len()), "{}", descriptions.spaces.len());
        assert_eq!(descriptions.in_short(Namespace([0; 16]), cut(0)), "", "the oldest is forgotten");
        assert_ne!(descriptions.in_short(Namespace([59; 16]), cut(59)), "");
    }
}
